"""The Monitor: looks now and then, tells once when something begins and when it ends, and changes nothing."""

import copy
import csv
import json
import logging

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence

import hiddenstate as hs
from hiddenstate.cells import unheard
from hiddenstate.diagnosis import CsvWriter, JsonlWriter


class Model(nn.Module):
    def __init__(self, **options):
        super().__init__()
        self.lstm = nn.LSTM(3, 8, batch_first=True, **options)
        self.cell = nn.GRUCell(8, 8)
        self.fc = nn.Linear(8, 1)

    def forward(self, x):
        out, _ = self.lstm(x)
        h = x.new_zeros(len(x), 8)
        for step in out.unbind(1):
            h = self.cell(step, h)
        return self.fc(h)


def train(model, optimizer, batches):
    for x in batches:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()


def batches(count, *, bad=None):
    made = [torch.randn(4, 6, 3) for _ in range(count)]
    if bad is not None:
        made[bad][2, 3, 1] = float("nan")
    return made


def test_watching_changes_no_weight_and_leaves_nothing_in_the_model():
    torch.manual_seed(1)
    model = Model()
    twin = copy.deepcopy(model)
    data = batches(7)
    optimizers = [torch.optim.Adam(m.parameters()) for m in (model, twin)]
    before = [sorted(vars(module)) for module in model.modules()]
    with hs.Monitor(model, optimizers[0], every=2):
        train(model, optimizers[0], data)
    train(twin, optimizers[1], data)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), twin.parameters(), strict=True))
    assert [sorted(vars(module)) for module in model.modules()] == before
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_history_holds_arrays_of_every_look():
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    monitor = hs.Monitor(model, optimizer, every=3)
    train(model, optimizer, batches(8))
    model.eval()
    model(torch.randn(2, 5, 3))
    monitor.close()
    history = monitor.history
    assert history["step"].tolist() == [0, 3, 6]
    assert monitor.step == 8
    for name in ("lstm.norm", "lstm.saturated", "lstm.dead", "lstm.gradient_first", "cell.gradient_last", "gradient"):
        assert history[name].shape == (3,), name
        assert (history[name] >= 0).all()
    assert monitor.findings == []


def test_the_gradients_are_those_that_backward_finds():
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    x = torch.randn(4, 6, 3)
    with hs.Monitor(model, optimizer, every=1) as monitor:
        train(model, optimizer, [x])
    leaf = x.clone().requires_grad_()
    model(leaf).square().mean().backward()
    sizes = leaf.grad.transpose(0, 1).flatten(1).norm(dim=1)
    torch.testing.assert_close(torch.tensor(monitor.history["lstm.gradient_first"][0]).float(), sizes[0])
    torch.testing.assert_close(torch.tensor(monitor.history["lstm.gradient_last"][0]).float(), sizes[-1])


def test_nan_is_named_with_layer_row_and_step_even_between_two_looks(caplog):
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    told = []
    caplog.set_level(logging.WARNING, "hiddenstate")
    with hs.Monitor(model, optimizer, on_finding=told.append) as monitor:
        train(model, optimizer, batches(5, bad=2))
    (episode,) = monitor.findings
    assert told == [episode]
    assert (episode.finding.code, episode.finding.where, episode.began, episode.ended) == ("HS401", "lstm", 2, None)
    assert "step 3 of row 2" in episode.finding.evidence
    assert "HS401" in caplog.text
    assert "step 2, still so: HS401" in str(monitor)


def test_a_finding_is_told_once_and_ends():
    model = nn.RNN(3, 8, batch_first=True)
    told = []
    with hs.Monitor(model, every=1, on_finding=lambda e: told.append((e.finding.code, e.began, e.ended))) as monitor:
        for scale in (1, 1000, 1000, 1000, 1):
            model(scale * torch.randn(4, 6, 3))[0].sum().backward()
    assert told == [("HS402", 1, None), ("HS402", 1, 4)]
    (episode,) = monitor.findings
    assert str(episode) == "step 1, until step 4: HS402 saturated (model)"


def test_dead_units_and_gradients_through_time_are_found():
    rnn = nn.RNN(3, 8, nonlinearity="relu", batch_first=True)
    nn.init.constant_(rnn.bias_ih_l0, -50.0)
    with hs.Monitor(rnn, every=1) as monitor:
        rnn(torch.randn(4, 6, 3))[0].sum().backward()
    assert [e.finding.code for e in monitor.findings] == ["HS403"]
    for factor, code in ((0.05, "HS501"), (3.0, "HS502")):
        rnn = nn.RNN(3, 8, nonlinearity="relu", batch_first=True)
        with torch.no_grad():
            rnn.weight_hh_l0.copy_(factor * torch.eye(8))
        with hs.Monitor(rnn, every=1) as monitor:
            rnn(torch.randn(4, 12, 3))[0][:, -1].sum().backward()
        assert code in [e.finding.code for e in monitor.findings]


def test_a_graph_that_grows_is_found():
    class Keeping(nn.Module):
        def __init__(self):
            super().__init__()
            self.lstm = nn.LSTM(3, 4, batch_first=True)
            self.hidden = None

        def forward(self, x):
            out, self.hidden = self.lstm(x, self.hidden)
            return out

    model = Keeping()
    with hs.Monitor(model, every=1) as monitor:
        for _ in range(4):
            model(torch.randn(2, 5, 3)).sum().backward(retain_graph=True)
    assert [e.finding.code for e in monitor.findings] == ["HS203"]


def test_parameters_that_nothing_trains_are_named():
    model = Model()
    model.extra = nn.Linear(2, 2)
    optimizer = torch.optim.SGD([*model.lstm.parameters(), *model.cell.parameters(), *model.fc.parameters()], lr=0.1)
    with hs.Monitor(model, optimizer, every=1) as monitor:
        train(model, optimizer, batches(2))
    codes = {e.finding.code: e.finding.where for e in monitor.findings}
    assert codes == {"HS504": "extra.weight, extra.bias", "HS503": "extra.weight, extra.bias"}


def test_packed_input_is_watched_without_its_padding():
    gru = nn.GRU(3, 8, batch_first=True)
    packed = pack_padded_sequence(torch.randn(3, 6, 3), torch.tensor([6, 4, 1]), batch_first=True)
    with hs.Monitor(gru, every=1) as monitor:
        gru(packed)[1].sum().backward()
    assert monitor.findings == []
    assert monitor.history["model.gradient_first"][0] > 0


def test_writers_get_numbers_and_findings(tmp_path):
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    writers = [CsvWriter(tmp_path / "log.csv"), JsonlWriter(tmp_path / "log.jsonl")]
    with hs.Monitor(model, optimizer, every=2, writers=writers) as monitor:
        train(model, optimizer, batches(5, bad=4))
    with open(tmp_path / "log.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["step"] for row in rows] == ["0", "2", "4"]
    assert float(rows[0]["lstm.norm"]) == pytest.approx(monitor.history["lstm.norm"][0])
    with open(tmp_path / "log.csv.findings.csv", newline="") as file:
        assert [(row["step"], row["event"], row["code"]) for row in csv.DictReader(file)] == [("4", "began", "HS401")]
    lines = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [0, 2, 4, 4]
    assert lines[-1]["began"]["code"] == "HS401"


def test_a_copy_of_a_watched_model_is_free(tmp_path):
    model = Model()
    with hs.Monitor(model, every=1) as monitor:
        twin = copy.deepcopy(model)
        twin(torch.randn(2, 5, 3))
    assert monitor.step == 0


@pytest.mark.parametrize("every", [0, -1, 2.5, True])
def test_an_interval_that_is_none_is_refused(every):
    with pytest.raises(hs.errors.BadInput, match=rf"every is {every}, but a whole number"):
        hs.Monitor(Model(), every=every)


class Step(nn.Module):
    """What a training framework wraps around a model: its own forward is never called."""

    def __init__(self):
        super().__init__()
        self.net, self.decoder = Model(), nn.GRU(3, 8, batch_first=True)

    def forward(self, x):
        return self.net(x)


@pytest.mark.parametrize(
    "call",
    [
        lambda step, x: step(x),
        lambda step, x: step.net(x),
        lambda step, x: step.net.forward(x),
        lambda step, x: step.net.lstm(x)[0],
        lambda step, x: step.net.lstm.forward(hx=None, input=x)[0],
    ],
)
def test_a_call_of_any_module_that_holds_a_layer_counts(call):
    step = Step()
    with hs.Monitor(step, every=2) as monitor:
        for x in batches(5):
            call(step, x).square().mean().backward()
    assert monitor.step == 5
    assert monitor.history["step"].tolist() == [0, 2, 4]
    assert (monitor.history["net.lstm.gradient_first"] > 0).all()


def test_modules_called_one_after_the_other_are_one_training_call_until_one_comes_again():
    step = Step()
    with hs.Monitor(step, every=1) as monitor:
        for x in batches(3):
            (step.net(x).mean() + step.decoder(x)[0].mean()).backward()
        assert monitor.step == 3
        step.decoder(batches(1)[0])
        assert monitor.step == 4, "it came again without the other"
        step.net(batches(1)[0])
        assert monitor.step == 4
        for count in (5, 6):
            step(batches(1)[0])
            assert monitor.step == count, "the model itself always begins a new one"
    assert (monitor.history["decoder.norm"][:4] > 0).all()
    assert (monitor.history["net.lstm.norm"] > 0).all()


def test_calls_in_eval_mode_and_calls_of_our_own_do_not_count():
    step = Step()
    with hs.Monitor(step, every=1) as monitor:
        step.net.eval()
        step.net(batches(1)[0])
        with unheard():
            step(batches(1)[0])
        assert (monitor.step, str(monitor)) == (0, "0 training calls, 0 looks, 0 findings")
        step.decoder(batches(1)[0])
        assert monitor.step == 1
        step.net(batches(1)[0])
    assert "net.lstm.norm" not in monitor.history


def test_a_call_that_raises_is_over():
    step = Step()
    with hs.Monitor(step, every=1) as monitor:
        with pytest.raises(RuntimeError, match="input"):
            step.net(torch.randn(4, 6, 5))
        step.net.eval()
        step.net(batches(1)[0])
    assert monitor.step == 1
    assert "net.lstm.norm" not in monitor.history


@pytest.mark.parametrize("factor", [0.05, 3.0])
def test_gradients_through_time_are_found_whatever_the_order_of_the_arguments(factor):
    rnn = nn.RNN(3, 8, nonlinearity="relu", batch_first=True)
    with torch.no_grad():
        rnn.weight_hh_l0.copy_(factor * torch.eye(8))
    with hs.Monitor(rnn, every=1) as monitor:
        rnn(hx=torch.zeros(1, 4, 8), input=torch.randn(4, 12, 3))[0][:, -1].sum().backward()
    assert {"HS501", "HS502"} & {e.finding.code for e in monitor.findings}


def test_packed_sequences_of_two_calls_are_looked_at_together():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.gru = nn.GRU(3, 8, batch_first=True)

        def forward(self, *packed):
            return sum(self.gru(one)[1].sum() for one in packed)

    packed = [pack_padded_sequence(torch.randn(3, n, 3), torch.tensor([n, 4, 1]), batch_first=True) for n in (6, 5)]
    model = Twice()
    with hs.Monitor(model, every=1) as monitor:
        model(*packed).backward()
    assert monitor.history["gru.norm"][0] > 0
    assert monitor.findings == []


def test_copies_for_several_devices_are_refused_by_name():
    model = Model()
    with hs.Monitor(model), pytest.raises(hs.errors.HiddenStateError, match=r"nn.DataParallel copies .* Monitor"):
        model._replicate_for_data_parallel()


def test_a_compiled_model_is_looked_at_and_so_is_one_that_is_compiled_in_part():
    step = Step()
    step.net = torch.compile(step.net, backend="eager")
    for model, call in ((step, step.net), (step.net, step.net)):
        with hs.Monitor(model, every=1) as monitor:
            for x in batches(2):
                call(x).square().mean().backward()
        assert monitor.step == 2
        assert any(name.endswith("lstm.gradient_first") for name in monitor.history)
