"""The examination as a whole: every mistake is found, nothing healthy is, and the model comes back as it was."""

import copy
import random
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

import hiddenstate as hs
from hiddenstate.cells import Adapter, Spec
from tests.diagnosis.patients.asked import ASKED
from tests.diagnosis.patients.healthy import HEALTHY, Classifier, floats
from tests.diagnosis.patients.sick import SICK
from tests.diagnosis.patients.unusual import UNUSUAL
from tests.support.cells import CELLS


@pytest.mark.parametrize("name", HEALTHY)
def test_a_healthy_model_gets_no_warning_and_no_error(name):
    model, inputs, options = HEALTHY[name]()
    report = hs.diagnose(model, *inputs, **options)
    assert report.ok, report.text()
    assert report.failed == {}


@pytest.mark.parametrize("name", UNUSUAL)
def test_an_unusual_model_gets_no_warning_and_no_error_either(name):
    model, inputs, options = UNUSUAL[name]()
    report = hs.diagnose(model, *inputs, **options)
    assert report.ok, report.text()
    assert report.failed == {}


@pytest.mark.filterwarnings("ignore:.*not used in this call:hiddenstate.errors.HiddenStateWarning")
@pytest.mark.parametrize("name", ASKED)
def test_a_published_mistake_is_found(name):
    codes, make = ASKED[name]
    model, inputs, options = make()
    report = hs.diagnose(model, *inputs, **options)
    assert set(codes) & set(report.codes), report.text()


@pytest.mark.parametrize("name", CELLS)
def test_a_healthy_cell_needs_no_input_and_gets_no_warning(name):
    report = hs.diagnose(CELLS[name].cell())
    assert report.ok, report.text()
    assert report.failed == {}
    assert "invented" in report.assumed[0]


@pytest.mark.parametrize("name", SICK)
def test_a_mistake_is_found_and_told_first(name):
    codes, make = SICK[name]
    model, inputs, options = make()
    report = hs.diagnose(model, *inputs, **options)
    assert report.codes[:1] == codes[:1], report.text()
    finding = report[0]
    assert finding.where
    assert any(character.isdigit() for character in finding.evidence), "evidence holds a number"
    assert finding.cause
    assert any(mark in finding.advice for mark in "(=[."), "advice holds code"
    assert finding.severity != "note"


def everything(model, optimizer=None):
    """All that an examination might leave behind."""
    return {
        "weights": {n: p.detach().clone() for n, p in model.named_parameters()},
        "grads": {n: None if p.grad is None else p.grad.clone() for n, p in model.named_parameters()},
        "buffers": {n: b.clone() for n, b in model.named_buffers()},
        "modes": [m.training for m in model.modules()],
        "hooks": [(len(m._forward_hooks), len(m._forward_pre_hooks), len(m._backward_hooks)) for m in model.modules()],
        "attributes": [sorted(vars(m)) for m in model.modules()],
        "torch": torch.get_rng_state(),
        "numpy": np.random.get_state()[1],
        "python": random.getstate(),
        "optimizer": copy.deepcopy(optimizer.state_dict()) if optimizer is not None else None,
        "grad mode": torch.is_grad_enabled(),
    }


def assert_same(before, after):
    for key, value in before.items():
        if isinstance(value, torch.Tensor):
            assert torch.equal(after[key], value), key
        elif isinstance(value, dict):
            for name, tensor in value.items():
                if isinstance(tensor, torch.Tensor):
                    assert torch.equal(after[key][name], tensor), f"{key} {name}"
                else:
                    assert repr(after[key][name]) == repr(tensor), f"{key} {name}"
        else:
            assert repr(after[key]) == repr(value), key


TRACED = [
    "batch norm in training mode",
    "heavy dropout",
    "stateful with reset",
    "learned initial state that is trained",
    "packed inside with lengths",
]


@pytest.mark.parametrize("name", TRACED)
def test_the_model_comes_back_as_it_was(name):
    model, inputs, options = HEALTHY[name]()
    optimizer = torch.optim.Adam(model.parameters())
    out = model(*inputs)
    (out[0] if isinstance(out, tuple) else out).sum().backward()
    optimizer.step()
    model.train()
    before = everything(model, optimizer)
    kept = [x.clone() if isinstance(x, torch.Tensor) else x for x in inputs]
    hs.diagnose(model, *inputs, **{**options, "optimizer": optimizer})
    assert_same(before, everything(model, optimizer))
    assert all(torch.equal(a, b) for a, b in zip(inputs, kept, strict=True) if isinstance(a, torch.Tensor))


def test_a_state_kept_by_the_model_is_there_afterwards():
    model, (x,), _ = SICK["hidden state kept with its graph"][1]()
    model(x)
    kept = model.hidden
    hs.diagnose(model, x)
    assert model.hidden is kept
    assert model.hidden[0].grad_fn is not None


def test_a_tensor_that_the_model_would_change_in_place_stays_as_it_was():
    model, (x, state), _ = SICK["state changed in place"][1]()
    before = [part.clone() for part in state]
    hs.diagnose(model, x, state)
    assert all(torch.equal(a, b) for a, b in zip(state, before, strict=True))


class Failing(nn.Module):
    """Works for a while."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(3, 4, batch_first=True)
        self.bn = nn.BatchNorm1d(4)

    def forward(self, x):
        if self.training:
            raise ValueError("not trained today")
        return self.bn(self.lstm(x)[0][:, -1])


def test_one_failing_check_does_not_stop_the_others():
    model, x = Failing().train(), floats()
    model.lstm, model.bn = nn.LSTM(3, 4, bidirectional=True, batch_first=True), nn.BatchNorm1d(8)
    before = everything(model)
    report = hs.diagnose(model, x)
    assert "HS107" in report.codes
    assert "not trained today" in report.failed["HS203"]
    assert "HS203 could not run: ValueError: not trained today" in report.text()
    assert_same(before, everything(model))


def test_a_model_that_cannot_be_called_is_not_ok_and_says_why():
    class Broken(nn.Module):
        def __init__(self):
            super().__init__()
            self.cells = [nn.LSTMCell(3, 4)]
            self.lstm = nn.LSTM(7, 4)

        def forward(self, x):
            return self.lstm(x)

    report = hs.diagnose(Broken(), floats())
    assert not report.ok
    assert "RuntimeError" in report.broken
    assert report.codes == ("HS205",)
    assert "could not be examined" in report.text()


def test_a_model_for_another_batch_size_is_told_which():
    class Fixed(nn.Module):
        def __init__(self):
            super().__init__()
            self.batch_size = 7
            self.gru = nn.GRU(3, 4, batch_first=True)

        def forward(self, x):
            return self.gru(x, torch.zeros(1, self.batch_size, 4))[0]

    report = hs.diagnose(Fixed(), floats())
    assert report.codes == ("HS204",)
    assert "7 rows run" in report[0].evidence


def test_findings_can_be_ignored_by_code():
    model, inputs, _ = SICK["batch first forgotten tagger"][1]()
    assert hs.diagnose(model, *inputs, ignore=["HS101"]).ok
    assert hs.diagnose(model, *inputs, ignore="HS101").ok
    with pytest.raises(hs.errors.BadInput, match=r"no finding 'HS999' to ignore.*HS101 to HS504"):
        hs.diagnose(model, *inputs, ignore=["HS999"])


def test_thresholds_can_be_changed_by_name():
    model, inputs, _ = SICK["weights too small for a long sequence"][1]()
    assert hs.diagnose(model, *inputs, thresholds={"vanishing": 0.0}).ok
    with pytest.raises(hs.errors.BadInput, match=r"no threshold named 'vanishes'.*vanishing"):
        hs.diagnose(model, *inputs, thresholds={"vanishes": 0.0})


def test_a_grave_finding_can_be_raised():
    model, inputs, _ = SICK["batch first forgotten tagger"][1]()
    with pytest.raises(hs.errors.DiagnosisFailed, match=r"severity 'error'[\s\S]*HS101"):
        hs.diagnose(model, *inputs, fail_on="warning")
    with pytest.raises(AssertionError):
        hs.diagnose(model, *inputs, fail_on="error")
    healthy = Classifier()
    assert hs.diagnose(healthy, floats(), fail_on="note").ok
    with pytest.raises(hs.errors.BadInput, match="fail_on is 'error', 'warning', 'note' or None, but is 'fatal'"):
        hs.diagnose(healthy, floats(), fail_on="fatal")


def test_a_warning_does_not_fail_on_error():
    model, inputs, options = SICK["dropout on one layer"][1]()
    assert hs.diagnose(model, *inputs, **options, fail_on="error").worst() == "warning"


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: hs.diagnose("model"), "takes an nn.Module, but this is str"),
        (lambda: hs.diagnose(nn.Linear(3, 3)), r"was given no inputs.*hs.diagnose\(model, x\)"),
        (lambda: hs.diagnose(Classifier(), None), "none of the inputs is a tensor"),
        (lambda: hs.diagnose(Classifier(), floats(), batch_axis=3), r"batch_axis is 3, but.*\(5, 9, 3\)"),
        (lambda: hs.diagnose(Classifier(), floats(), lengths=[3, 4]), "lengths has 2 entries.*5 rows.*batch_axis=1"),
        (lambda: hs.diagnose(Classifier(), torch.zeros(0, 9, 3)), "0 rows and 9 steps: there is nothing to look at"),
    ],
)
def test_what_cannot_be_meant_is_refused(call, message):
    with pytest.raises(hs.errors.BadInput, match=message):
        call()


def test_a_row_alone_is_multiplied_and_many_rows_are_thinned_out():
    assert any("4 were used" in line for line in hs.diagnose(Classifier(), floats(1, 9, 3)).assumed)
    report = hs.diagnose(Classifier(), floats(40, 9, 3))
    assert report.ok
    assert any("16 of 40 rows were used" in line for line in report.assumed)


def test_a_model_that_resets_gets_a_note_that_names_the_method():
    model, inputs, _ = HEALTHY["stateful with reset"]()
    (note,) = hs.diagnose(model, *inputs)
    assert (note.code, note.severity) == ("HS201", "note")
    assert "reset_hidden()" in note.cause


def test_a_carried_model_gets_a_note_and_goes_on_where_it_was():
    model = Classifier()
    with hs.Carry(model) as carry:
        model(floats())
        before = {name: part.clone() for name, part in carry.state.items()}
        (note,) = hs.diagnose(model, floats())
        assert (note.code, note.severity) == ("HS201", "note")
        assert "hs.Carry" in note.cause
        assert all(torch.equal(before[name], part) for name, part in carry.state.items())


def test_a_table_of_samples_read_as_one_sequence_is_noted():
    class Table(nn.Module):
        def __init__(self):
            super().__init__()
            self.lstm = nn.LSTM(5, 8, batch_first=True)
            self.fc = nn.Linear(8, 1)

        def forward(self, x):
            return self.fc(self.lstm(x)[0])

    report = hs.diagnose(Table(), torch.randn(16, 5))
    assert report.ok
    assert report.codes == ("HS101",)
    assert "unsqueeze(1)" in report[0].advice


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("softmax over the batch", "F.softmax"),
        ("softmax over time", "F.softmax"),
        ("last state added to every step", "out + h[-1]"),
        ("input rolled the wrong way", "torch.roll"),
        ("view instead of transpose", ".view("),
        ("random initial state", "torch.randn"),
    ],
)
def test_the_line_of_the_mistake_is_named(name, text):
    model, inputs, _ = SICK[name][1]()
    where = hs.diagnose(model, *inputs)[0].where
    file, _, line = where.rpartition("(")[2].strip(")").partition(":")
    source = (Path(__file__).parent / "patients" / file).read_text().splitlines()
    assert text in source[int(line) - 1]


def test_infinite_numbers_become_null_in_json():
    finding = hs.diagnosis.Finding("HS201", "error", "h", "1", "c", "a.b", {"gap": float("inf")})
    assert finding.to_dict()["numbers"] == {"gap": None}


def test_a_large_vocabulary_is_examined_with_a_few_rows():
    class Words(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.gru, self.head = (
                nn.Embedding(30_000, 4),
                nn.GRU(4, 4, batch_first=True),
                nn.Linear(4, 30_000),
            )

        def forward(self, x):
            return self.head(self.gru(self.embed(x))[0])

    report = hs.diagnose(Words(), torch.randint(30_000, (8, 9)))
    assert report.ok, report.text()
    assert any("4 of 8 rows" in line for line in report.assumed)


def test_it_works_where_gradients_are_off():
    with torch.inference_mode():
        assert hs.diagnose(Classifier(), floats()).ok
    with torch.no_grad():
        model, inputs, _ = SICK["detached inside the loop"][1]()
        assert hs.diagnose(model, *inputs).codes == ("HS105",)


@pytest.mark.cuda
@pytest.mark.parametrize("name", ["lstm classifier", "packed inside with lengths", "stack of cells in a loop"])
def test_a_model_on_a_gpu_is_examined_there(name):
    model, inputs, options = HEALTHY[name]()
    inputs = [x.cuda() if isinstance(x, torch.Tensor) else x for x in inputs]
    report = hs.diagnose(model.cuda(), *inputs, **options)
    assert report.ok, report.text()
    assert report.failed == {}


def test_a_cell_is_examined_as_it_is_called():
    x, h = torch.randn(6, 3), torch.zeros(6, 4)
    report = hs.diagnose(nn.GRUCell(3, 4), x, h)
    assert report.ok
    assert "begins with it" in report.assumed[0]
    assert hs.diagnose(nn.GRUCell(3, 4), torch.randn(6, 5, 3)).ok


def test_unfamiliar_names_do_not_keep_a_cell_from_being_examined():
    class Cell(nn.Module):
        def __init__(self):
            super().__init__()
            self.input_size, self.hidden_size = 3, 4
            self.a, self.b = nn.Linear(3, 4), nn.Linear(4, 4)

        def forward(self, x, y):
            return torch.tanh(self.a(x))

    assert hs.diagnose(Cell()).codes[0] == "HS103"


class Spare(nn.Module):
    def __init__(self):
        super().__init__()
        self.gru = nn.GRU(3, 8, batch_first=True)
        self.spare = nn.LSTM(3, 8)
        self.cell = nn.GRUCell(3, 8)
        self.requires_grad_(False)

    def forward(self, x):
        return self.gru(x)[0]


def test_layers_that_were_never_called_are_named_to_the_user_and_in_the_report():
    told = "spare, cell were not used in this call, so nothing is said of them; a layer whose weights are used without"
    with pytest.warns(hs.errors.HiddenStateWarning, match=f"hs.diagnose\\(Spare\\): {told} calling it is not heard"):
        report = hs.diagnose(Spare(), torch.randn(4, 6, 3))
    assert any(note.startswith(told) for note in report.assumed)
    assert report.ok, report.text()


def test_the_warning_points_to_the_line_that_asked():
    with pytest.warns(hs.errors.HiddenStateWarning) as caught:
        hs.diagnose(Spare(), torch.randn(4, 6, 3))
    assert caught[0].filename == __file__


def test_a_layer_whose_calls_cannot_be_read_is_named():
    class Odd(nn.Module):
        hidden_size = 8

        def __init__(self):
            super().__init__()
            self.map = nn.Linear(3, 8)

        def forward(self, x, hidden=None):
            return self.map(x.value), "no state at all"

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.gru, self.odd = nn.GRU(3, 8, batch_first=True), Odd()

        def forward(self, x):
            return self.gru(x)[0] + self.odd(SimpleNamespace(value=x))[0]

    with pytest.warns(
        hs.errors.HiddenStateWarning, match=r"odd was called in a way that cannot be read \(NotRecurrent"
    ):
        hs.diagnose(Model(), torch.randn(4, 6, 3))


class Leaky(nn.Module):
    """A layer of a kind of its own: it runs whole sequences, and its arguments and state have names of their own."""

    def __init__(self):
        super().__init__()
        self.drive, self.recurrent = nn.Linear(3, 8), nn.Linear(8, 8)

    def run(self, seq, memory=None):
        trace, steps = seq.new_zeros(len(seq), 8) if memory is None else memory["trace"], []
        for x in seq.unbind(1):
            trace = 0.5 * trace + 0.5 * torch.tanh(self.drive(x) + self.recurrent(trace))
            steps.append(trace)
        return torch.stack(steps, dim=1), {"trace": trace}

    def forward(self, seq, memory=None):
        return self.run(seq, memory)


class LeakyAdapter(Adapter):
    kind, fused = "leaky", True

    def spec(self, module):
        return Spec(("trace",), {"trace": 8}, input_size=3)

    def initial(self, module, batch):
        return hs.State({"trace": torch.zeros(batch, 8)})

    def to_state(self, module, native, *, batch=None):
        return hs.State(native)

    def to_native(self, module, state, *, batched=True):
        return dict(state)

    def split(self, module, result):
        return result


hs.register(Leaky, LeakyAdapter())


class AroundLeaky(nn.Module):
    def __init__(self, read):
        super().__init__()
        self.leaky, self.head, self.read = Leaky(), nn.Linear(8, 2), read

    def forward(self, x):
        return self.head(self.read(*self.leaky(memory={"trace": x.new_zeros(len(x), 8)}, seq=x)))


@pytest.mark.parametrize(
    ("read", "codes"),
    [
        (lambda out, memory: out, ()),
        (lambda out, memory: out[:, -1], ()),
        (lambda out, memory: memory["trace"], ()),
        (lambda out, memory: out[:, 0], ("HS109",)),
        (lambda out, memory: out.flip(0), ("HS110",)),
    ],
)
def test_a_registered_layer_that_runs_sequences_is_examined_like_any_other(read, codes):
    report = hs.diagnose(AroundLeaky(read), torch.randn(4, 8, 3))
    assert report.codes[:1] == codes, report.text()
    assert report.failed == {}


def test_a_registered_layer_is_examined_alone_and_without_input():
    for inputs in ((), (torch.randn(4, 8, 3),)):
        report = hs.diagnose(Leaky(), *inputs)
        assert report.ok, report.text()
        assert report.failed == {}
