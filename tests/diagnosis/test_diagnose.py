"""The examination as a whole: every mistake is found, nothing healthy is, and the model comes back as it was."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import hiddenstate as hs
from hiddenstate.cells import Adapter, Spec
from tests.diagnosis.patients.asked import ASKED
from tests.diagnosis.patients.healthy import HEALTHY, Classifier, floats
from tests.diagnosis.patients.newcomers import PAIRS
from tests.diagnosis.patients.sick import SICK
from tests.diagnosis.patients.unusual import UNUSUAL
from tests.support.untouched import untouched


@pytest.mark.sample(50)
@pytest.mark.parametrize("name", HEALTHY)
def test_a_healthy_model_gets_no_warning_and_no_error(name):
    model, inputs, options = HEALTHY[name]()
    report = hs.diagnose(model, *inputs, **options)
    assert report.ok, report.text()
    assert report.failed == {}


@pytest.mark.sample(40)
@pytest.mark.parametrize("name", UNUSUAL)
def test_an_unusual_model_gets_no_warning_and_no_error_either(name):
    model, inputs, options = UNUSUAL[name]()
    report = hs.diagnose(model, *inputs, **options)
    assert report.ok, report.text()
    assert report.failed == {}


@pytest.mark.sample(40)
@pytest.mark.filterwarnings("ignore:.*not used in this call:hiddenstate.errors.HiddenStateWarning")
@pytest.mark.parametrize("name", ASKED)
def test_a_published_mistake_is_found(name):
    codes, make = ASKED[name]
    model, inputs, options = make()
    report = hs.diagnose(model, *inputs, **options)
    assert set(codes) & set(report.codes), report.text()


@pytest.mark.sample(50)
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


@pytest.mark.sample(40)
@pytest.mark.parametrize("name", PAIRS)
def test_what_was_misjudged_once_is_told_apart(name):
    code, sick, healthy = PAIRS[name]
    model, inputs, options = sick()
    report = hs.diagnose(model, *inputs, **options)
    assert code in [finding.code for finding in report if finding.severity != "note"], report.text()
    model, inputs, options = healthy()
    report = hs.diagnose(model, *inputs, **options)
    assert report.ok, report.text()
    assert report.failed == {}


ALL = {
    **{f"sick: {name}": make for name, (_, make) in SICK.items()},
    **{f"asked: {name}": make for name, (_, make) in ASKED.items()},
    **{f"misjudged: {name}": make for name, (_, make, _) in PAIRS.items()},
}


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:.*not used in this call:hiddenstate.errors.HiddenStateWarning")
@pytest.mark.parametrize("name", ALL)
def test_what_is_ignored_changes_no_other_verdict(name):
    reports = []
    for ignored in ((), None):
        torch.manual_seed(0)
        model, inputs, options = ALL[name]()
        ignored = reports[0].codes[:1] if ignored is None else ignored
        reports.append(hs.diagnose(model, *inputs, **{**options, "ignore": ignored}))
    rest = [finding for finding in reports[0].findings if finding.code not in reports[0].codes[:1]]
    assert [str(finding) for finding in reports[1]] == [str(finding) for finding in rest]


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
    with untouched(model):
        report = hs.diagnose(model, x)
    assert "HS107" in report.codes
    assert "not trained today" in report.failed["HS203"]
    assert "HS203 could not run: ValueError: not trained today" in report.text()


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
    with pytest.raises(hs.errors.BadInput, match=r"no finding 'HS999' to ignore.*HS101 to HS505"):
        hs.diagnose(model, *inputs, ignore=["HS999"])


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


def test_a_model_that_resets_gets_a_note_that_names_the_method():
    model, inputs, _ = HEALTHY["stateful with reset"]()
    (note,) = hs.diagnose(model, *inputs)
    assert (note.code, note.severity) == ("HS201", "note")
    assert "reset_hidden()" in note.cause


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


@pytest.mark.cuda
@pytest.mark.parametrize("name", ["lstm classifier", "packed inside with lengths", "stack of cells in a loop"])
def test_a_model_on_a_gpu_is_examined_there(name):
    model, inputs, options = HEALTHY[name]()
    inputs = [x.cuda() if isinstance(x, torch.Tensor) else x for x in inputs]
    report = hs.diagnose(model.cuda(), *inputs, **options)
    assert report.ok, report.text()
    assert report.failed == {}


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

    said = r"odd was called in a way that cannot be read \(NotRecurrent: Odd returned"  # the layer is named once
    with pytest.warns(hs.errors.HiddenStateWarning, match=said):
        report = hs.diagnose(Model(), torch.randn(4, 6, 3))
    assert report.findings or str(report).startswith("Model: nothing found in what was heard\n")


def test_a_layer_that_keeps_its_state_to_itself_is_not_called_healthy():
    class OutputAlone(nn.GRU):
        def forward(self, x, hx=None):
            return super().forward(x, hx)[0]

    with pytest.warns(hs.errors.HiddenStateWarning, match=r"0 was called in a way.*OutputAlone returned Tensor, but"):
        report = hs.diagnose(nn.Sequential(OutputAlone(3, 8, batch_first=True)), torch.randn(4, 6, 3))
    assert str(report).startswith("Sequential: nothing found in what was heard\n")


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
