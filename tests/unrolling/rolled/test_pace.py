"""A loop and the engine are measured on a run's own numbers, there and back, and nothing of the user's is touched."""

import copy

import pytest
import torch
from torch import nn

import hiddenstate as hs
from hiddenstate.unrolling.deciding import EngineDecision, decide
from hiddenstate.unrolling.rolled import pace, site
from hiddenstate.unrolling.rolled.turns import Turns, Written, first_turns


class Appending(nn.Module):
    """Leaves its states in a list."""

    def __init__(self):
        super().__init__()
        self.into = nn.Linear(9, 6)
        self.noise = nn.Dropout(0.3)

    def forward(self, x):
        h, outs, total = x.new_zeros(x.shape[0], 6), [], x.new_zeros(())
        for t in range(x.shape[1]):
            h = torch.tanh(self.into(torch.cat([self.noise(x[:, t]), h], -1)))
            total = total + h.mean()
            outs.append(h)
        return torch.stack(outs, 1) + total


class Writing(Appending):
    """Writes its states into a tensor, from the end."""

    def forward(self, x):
        h, out = x.mean(1) @ self.into.weight.T[:3], torch.zeros(x.shape[0], x.shape[1], 6)
        for t in reversed(range(x.shape[1])):
            out[:, t] = h = torch.tanh(self.into(torch.cat([x[:, t], h], -1)))
        return out


class Growing(Appending):
    """Joins its states to what there is, which leads back to the input."""

    def forward(self, x):
        out = x.mean(1, keepdim=True) @ self.into.weight.T[:3]
        h = out[:, 0]
        for t in range(x.shape[1]):
            h = torch.tanh(self.into(torch.cat([x[:, t], h], -1)))
            out = torch.cat([out, h.unsqueeze(1)], 1)
        return out


MODELS = (Appending, Writing, Growing)


@pytest.fixture
def paces(monkeypatch):
    """What was measured, in the order of decisions; each is for the engine."""
    seen = []
    monkeypatch.setattr(
        "hiddenstate.unrolling.cache.decide", lambda *given: seen.append(given) or EngineDecision(1, "said so")
    )
    return seen


def before_a_loop(x):
    """An input with a graph of its own, as of layers below."""
    x = x.clone().requires_grad_()
    return x, torch.tanh(x * 2)


@pytest.mark.parametrize("kind", MODELS)
def test_a_trial_leaves_graphs_grads_and_random_streams_alone(kind, paces):
    torch.manual_seed(0)
    model, x = kind(), torch.randn(3, 7, 3)
    twin = copy.deepcopy(model)
    leaves = []
    with hs.accelerate(model) as faster:
        for each in (model, twin):
            torch.manual_seed(1)
            leaf, above = before_a_loop(x)
            out = each(above)
            assert all(weight.grad is None for weight in each.parameters())
            stream = torch.get_rng_state()
            out.square().sum().backward()  # all of it is still there
            leaves.append((out, stream, leaf.grad, *(weight.grad for weight in each.parameters())))
        assert "said so" in faster.explain()
    for ours, plain in zip(*leaves, strict=True):
        torch.testing.assert_close(ours, plain)
    written, ours, _ = paces[0]
    assert (written.steps, ours.steps) == (7, 7)
    assert all(0 < way.several < 60 for way in (written, ours))
    assert all(way.one >= 0 for way in (written, ours))


def test_without_gradients_the_way_there_is_measured(paces):
    model, x = Appending(), torch.randn(3, 20, 3)
    with hs.accelerate(model), torch.no_grad():
        model(x)
    assert [way.steps for way in paces[0][:2]] == [20, 20]


def test_where_the_engine_is_slower_than_the_loop_as_it_is_written_the_loop_stays(monkeypatch):
    """The turn as a cell, step by step, takes longer than the loop: by that yardstick the engine would win."""
    asked = []
    monkeypatch.setattr(pace, "seconds_of", lambda run: run() or (asked.append(run.args[-1].__name__), len(asked))[1])
    monkeypatch.setattr("hiddenstate.unrolling.cache.decide", decide)
    model, x = Appending(), torch.randn(3, 20, 3)
    with hs.accelerate(model) as faster:
        model(x)
        assert asked == ["as_written", "_trial"] * 10  # in turn, each of which took a second longer
        model(x)
        assert (
            "as it is written: that is no slower (20 steps take 12000.00 ms by it and 11000.00 ms" in faster.explain()
        )


def test_a_trial_goes_back_through_no_weight_that_the_model_has_computed(paces):
    class Computing(Appending):
        def __init__(self):
            super().__init__()
            self.raw, self.went_back, self.more = nn.Parameter(torch.randn(9, 6)), [], [torch.zeros(2)]

        def forward(self, x):
            self.weight = torch.tanh(self.raw)
            self.weight.register_hook(self.went_back.append)
            h = x.new_zeros(x.shape[0], 6)
            for t in range(x.shape[1]):
                h = torch.tanh(torch.cat([x[:, t], h], -1) @ self.weight)
            return h

    model, x = Computing(), torch.randn(3, 20, 3)
    (expected,) = torch.autograd.grad(model(x).sum(), model.raw)
    model.went_back.clear()
    with hs.accelerate(model) as faster:
        out = model(x)
        assert "said so" in faster.explain()
        assert not model.went_back
        torch.testing.assert_close(torch.autograd.grad(out.sum(), model.raw)[0], expected)
        assert len(model.went_back) == 1


def test_a_trial_that_fails_leaves_the_loop_as_it_is_written(monkeypatch):
    def failing(self, turns, names):
        raise ZeroDivisionError("a trial")

    monkeypatch.setattr(site.LoopSite, "_trial", failing)
    model, x = Appending().eval(), torch.randn(3, 20, 3)
    expected = model(x)
    with hs.accelerate(model) as faster:
        for _ in range(3):
            torch.testing.assert_close(model(x), expected)
        assert "a trial fails: ZeroDivisionError: a trial" in faster.explain()


@pytest.mark.parametrize("backwards", [False, True])
def test_the_first_turns_take_their_pieces_as_they_lie_and_write_elsewhere(backwards):
    pieces, into = torch.arange(30.0).view(2, 5, 3).transpose(0, 1), torch.zeros(5, 2)
    turns = first_turns(Turns(5, {"t": range(5, 10)}, {"x": pieces}, {"hs_into": Written(into, backwards)}), 3)
    assert (turns.count, list(turns.counts["t"])) == (3, [5, 6, 7])
    assert turns.pieces["x"].stride() == pieces.stride()
    assert torch.equal(turns.pieces["x"], pieces[:3])
    turns.written["hs_into"].write([], torch.ones(3, 2))
    assert not into.any()
