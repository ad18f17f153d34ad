"""A loop in a model, from its first run on: what is said of it, when it runs as written; nothing is harmed."""

import copy
import pickle

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import hiddenstate as hs
from hiddenstate.unrolling.deciding import EngineDecision


class Gated(nn.Module):
    def __init__(self, rows=False):
        super().__init__()
        self.into, self.gate, self.head = nn.Linear(9, 6), nn.Linear(9, 6), nn.Linear(6, 2)
        self.scale, self.rows = 1.0, rows

    def step(self, x, h):
        both = torch.cat([x, h], -1)
        z = torch.sigmoid(self.gate(both))
        return (1 - z) * h + z * torch.tanh(self.into(both)) * self.scale

    def forward(self, x, h=None):
        h = x.new_zeros(x.shape[0], 6) if h is None else h
        outs = []
        for t in range(x.shape[1]):
            h = self.step(x[:, t], h)
            outs.append(h)
        return self.head(torch.stack(outs, 1)), h


@pytest.fixture
def x():
    return torch.randn(3, 8, 3, generator=torch.Generator().manual_seed(0))


@pytest.fixture
def model():
    torch.manual_seed(0)
    return Gated()


@pytest.fixture(autouse=True)
def faster_in_any_case(monkeypatch):
    monkeypatch.setattr("hiddenstate.unrolling.cache.decide", lambda *_: EngineDecision(1, "said so"))


def same(one, other):
    return all(torch.allclose(a, b, atol=1e-6) for a, b in zip(one, other, strict=True))


def test_what_is_said_of_a_loop_from_call_to_call(model, x):
    with hs.accelerate(model) as faster:
        where = "the model itself (Gated), loop of line "
        assert faster.explain().startswith(where)
        assert faster.explain().endswith(": not run yet")
        plain = model(x)
        assert faster.explain().endswith(": by the schedule from 1 steps on: said so")
        assert same(model(x), plain)
        assert faster.explain().endswith(": by the engine, said so")
        assert torch.allclose(model(x[:, :3])[0], plain[0][:, :3], atol=1e-6)
        assert faster.explain().endswith(": as it is written: it ran for fewer than 4 turns")
    assert "forward" not in model.__dict__


def test_attributes_and_weights_that_change_are_followed(model, x):
    twin = copy.deepcopy(model)
    with hs.accelerate(model):
        for scale in (1.0, 0.5, 0.25, 2.0):
            model.scale = twin.scale = scale
            with torch.no_grad():
                for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
                    ours.mul_(0.9)
                    theirs.mul_(0.9)
            assert same(model(x), twin(x))
            assert same(model(x, torch.ones(3, 6)), twin(x, torch.ones(3, 6)))


def test_a_hook_on_what_a_turn_calls_sees_every_turn(model, x):
    seen = []
    with hs.accelerate(model) as faster:
        model(x)
        handle = model.gate.register_forward_hook(lambda *_: seen.append(1))
        model(x)
        assert len(seen) == 8
        assert "as it is written: a hook on a Linear wants to see every turn" in faster.explain()
        handle.remove()
        model.head.register_forward_hook(lambda *_: seen.append(2))
        model(x)
        assert seen == [1] * 8 + [2]
        assert "by the engine" in faster.explain()


def test_with_the_engine_switched_off_it_runs_as_it_is_written(model, x, monkeypatch):
    with hs.accelerate(model) as faster:
        monkeypatch.setenv("HIDDENSTATE_ENGINE", "loop")
        model(x)
        model(x)
        assert faster.explain().endswith(": not run yet")


def test_checkpointed_it_runs_as_it_is_written(model, x):
    x = x.requires_grad_()
    model(x)[0].sum().backward()
    expected, x.grad = x.grad, None
    with hs.accelerate(model) as faster:
        for _ in range(3):
            checkpoint(model, x, use_reentrant=False)[0].sum().backward()
            assert torch.allclose(x.grad, expected, atol=1e-6)
            x.grad = None
        assert "activation checkpointing runs it a second time" in faster.explain()


def test_recorded_carried_and_monitored_it_is_seen_all_the_same(x):
    class Cell(nn.Module):
        def __init__(self):
            super().__init__()
            self.cell = nn.GRUCell(3, 4)

        def forward(self, x):
            h = x.new_zeros(x.shape[0], 4)
            for t in range(x.shape[1]):
                h = self.cell(x[:, t], h)
            return h

    torch.manual_seed(0)
    model = Cell()
    with hs.record(model) as plain:
        model(x)
    with hs.accelerate(model) as faster:
        for _ in range(3):
            model(x)
        for _ in range(3):
            with hs.record(model) as recorded:
                model(x)
            assert torch.allclose(recorded["cell"].h, plain["cell"].h, atol=1e-6)
        with hs.Carry(model, override=True):
            assert torch.allclose(model(x[:, :4]), plain["cell"].h[:, 3], atol=1e-6)
            assert torch.allclose(model(x[:, 4:]), plain["cell"].h[:, -1], atol=1e-6)
        model(x)
        assert "by the engine" in faster.explain()


def test_copies_and_pickles_know_nothing_of_it(model, x):
    with hs.accelerate(model):
        model(x)
        model(x)
        copied = copy.deepcopy(model)
        assert "forward" not in copied.__dict__
        assert "forward" not in pickle.loads(pickle.dumps(model)).__dict__
        assert list(model.state_dict()) == list(copied.state_dict())


def test_an_error_in_a_turn_is_the_users_own_and_the_next_call_goes_on(model, x):
    expected = model(x)
    with hs.accelerate(model):
        model(x)
        with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
            model(x[..., :2])
        assert same(model(x), expected)


def test_where_the_engine_is_slower_the_loop_stays(model, x, monkeypatch):
    monkeypatch.setattr("hiddenstate.unrolling.cache.decide", lambda *_: EngineDecision(None, "slower"))
    with hs.accelerate(model) as faster:
        for _ in range(3):
            model(x)
        assert "no faster (slower)" in faster.explain() or "no slower (slower)" in faster.explain()


def test_a_model_without_loops_is_refused_by_name():
    with pytest.raises(
        hs.errors.NotRecurrent, match=r"Linear has no nn\.RNN, nn\.LSTM or nn\.GRU in it and no loop in its"
    ):
        hs.accelerate(nn.Linear(2, 2))


def test_a_first_turn_that_was_in_vain_leaves_no_trace(monkeypatch):
    """Where the engine declines after the first turn, the loop starts from what was there, not from a turn later."""

    class Listed(nn.Module):
        def __init__(self):
            super().__init__()
            self.cell = nn.GRUCell(3, 4)

        def forward(self, x, states):
            for t in range(x.shape[1]):
                states[0] = self.cell(x[:, t], states[0])
            return states[0]

    torch.manual_seed(0)
    model, x = Listed(), torch.randn(2, 6, 3)
    expected = model(x, [None])
    with hs.accelerate(model) as faster:
        for _ in range(3):
            assert torch.allclose(model(x, [None]), expected, atol=1e-6)
        assert "by the engine" in faster.explain()
        monkeypatch.setattr("hiddenstate.unrolling.rolled.site.ready", lambda *_: "said so")
        states = [None]
        assert torch.allclose(model(x, states), expected, atol=1e-6)
        assert "as it is written: said so" in faster.explain()
        assert torch.allclose(states[0], expected, atol=1e-6)


def test_elsewhere_than_on_a_processor_it_runs_as_it_is_written(model, x):
    with hs.accelerate(model) as faster:
        model.to("meta")(x.to("meta"))
        assert "as it is written: on meta nothing was compared yet" in faster.explain()
