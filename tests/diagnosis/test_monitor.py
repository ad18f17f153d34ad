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


def test_watching_changes_neither_weights_nor_hooks():
    torch.manual_seed(1)
    model = Model()
    twin = copy.deepcopy(model)
    data = batches(7)
    optimizers = [torch.optim.Adam(m.parameters()) for m in (model, twin)]
    with hs.Monitor(model, optimizers[0], every=2):
        train(model, optimizers[0], data)
    train(twin, optimizers[1], data)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), twin.parameters(), strict=True))
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
