"""A few rows of a layer, run again: gates and memory, and nothing that the user could notice."""

import copy

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import hiddenstate as hs
from hiddenstate.cells import Call, layers
from hiddenstate.diagnosis import samples
from hiddenstate.diagnosis.samples import LayerSample, SampleClock

KINDS = {
    "lstm": (lambda: nn.LSTM(3, 8, batch_first=True), (4, 12, 3)),
    "time first": (lambda: nn.GRU(3, 8), (12, 4, 3)),
    "deep, with dropout": (lambda: nn.LSTM(3, 8, 2, dropout=0.5, batch_first=True), (4, 12, 3)),
}


def sampled(module, x):
    (layer,) = layers(module)
    sample = LayerSample(layer)
    sample.add(Call(layer, (x,)).returned(module(x)))
    return sample


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("scale", [1, 1000])
def test_the_numbers_are_those_of_measures(kind, scale):
    torch.manual_seed(0)
    make, shape = KINDS[kind]
    module, x = make(), scale * torch.randn(shape)
    random, training = torch.get_rng_state(), module.training
    found = sampled(module.eval(), x).numbers()
    module.train(training)
    survey = hs.measure.survey(module, [x], gates=True).saturation
    shares = [[g.share for g in one.gates.values() if g.range == "sigmoid"] for one in survey.values()]
    assert found.gates == pytest.approx(max(sum(each) / len(each) for each in shares), abs=0.02)
    assert abs(found.memory - hs.measure.memory(module, x).length) <= 3
    assert torch.equal(torch.get_rng_state(), random)


def test_a_cell_is_stepped_along_the_inputs_that_it_was_given():
    cell, x = nn.GRUCell(3, 8), torch.randn(4, 10, 3)
    (layer,) = layers(cell)
    sample, h = LayerSample(layer), None
    for step in x.unbind(1):
        h = cell(step, h)
        sample.add(Call(layer, (step,)).returned(h))
    assert abs(sample.numbers().memory - hs.measure.memory(cell, x).length) <= 3


def test_no_more_time_is_spent_than_a_hundredth(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(samples, "perf_counter", lambda: now[0])

    class Slow:
        def numbers(self):
            now[0] += 1.0

    clock, due = SampleClock(), 0
    while now[0] < 1000:
        now[0] += 1.0
        if clock.due():
            clock.taken({"rnn": Slow()})
            due += 1
    assert 9 <= due <= 12  # the first, which loads code, and a hundredth of the time


@pytest.mark.parametrize("wrapped", [False, True])
def test_sampling_changes_nothing_under_checkpointing_and_dropout(wrapped, monkeypatch):
    monkeypatch.setattr(samples, "_SHARE", float("inf"))
    torch.manual_seed(0)
    model = nn.LSTM(3, 8, 2, dropout=0.5, batch_first=True)
    twin, data = copy.deepcopy(model), torch.randn(3, 5, 9, 3)

    def train(one):
        torch.manual_seed(1)
        optimizer = torch.optim.SGD(one.parameters(), lr=0.1)
        monitor = hs.Monitor(one, optimizer, every=1) if one is model else None
        for x in data:
            out = checkpoint(one, x, use_reentrant=False)[0] if wrapped else one(x)[0]
            out.square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        if monitor is not None:
            monitor.close()
            assert len(monitor.history["model.memory"]) == 3
            assert (monitor.history["model.memory"] > 0).all()

    train(model)
    train(twin)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), twin.parameters(), strict=True))


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
def test_saturated_gates_are_told_until_a_sample_shows_otherwise(kind, monkeypatch):
    monkeypatch.setattr(samples, "_SHARE", float("inf"))
    torch.manual_seed(0)
    model, told = kind(8, 32, batch_first=True), []
    with hs.Monitor(model, every=1, on_finding=lambda each: told.append((each.finding.code, each.began, each.ended))):
        for scale in (1, 1000, 1000, 1):
            model(scale * torch.randn(4, 20, 8))[0].square().mean().backward()
    assert [each for each in told if each[0] == "HS402"] == [("HS402", 1, None), ("HS402", 1, 3)]


def test_a_look_without_a_sample_ends_nothing_that_a_sample_has_told(monkeypatch):
    monkeypatch.setattr(samples, "_SHARE", -1.0)  # no sample but the first
    torch.manual_seed(0)
    model = nn.LSTM(8, 32, batch_first=True)
    with hs.Monitor(model, every=1) as monitor:
        for scale in (1000, 1000, 1):
            model(scale * torch.randn(4, 20, 8))[0].square().mean().backward()
    (episode,) = [each for each in monitor.findings if each.finding.code == "HS402"]
    assert episode.ended is None or "gates" not in episode.finding.numbers
    assert len(monitor.history["model.gates"]) == 3
    assert int((monitor.history["model.gates"] >= 0).sum()) == 1
