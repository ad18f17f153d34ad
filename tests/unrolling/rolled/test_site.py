"""A loop in a model, from its first run on: what is said of it, when it runs as written; nothing is harmed."""

import copy
import pickle
import re
import warnings

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


class Several(nn.Module):
    """One loop in a style of collecting, with a start that its cell makes."""

    def __init__(self):
        super().__init__()
        self.cell, self.out = nn.GRUCell(3, 6), nn.Linear(6, 3)

    def unbound_start(self, x, memory=None):
        h, outs = None, []
        for t in range(x.shape[1]):
            h = self.cell(x[:, t], h)
            outs.append(h)
        return torch.stack(outs, 1), h

    def places_of_a_list(self, x, memory):
        h, outs = x.new_zeros(x.shape[0], 6), [None] * x.shape[1]
        for t in range(x.shape[1] - 1, -1, -1):
            h = self.cell(x[:, t], h)
            outs[t] = h
        return torch.stack(outs, 1), h

    def places_of_a_dict(self, x, memory):
        h, outs = x.new_zeros(x.shape[0], 6), {}
        for t in range(x.shape[1]):
            h = self.cell(x[:, t], h)
            outs[t] = (h, -h)
        assert list(outs) == list(range(x.shape[1]))
        return torch.stack([a + b * t for t, (a, b) in outs.items()], 1), h

    def in_front(self, x, memory):
        h, outs = x.new_zeros(x.shape[0], 6), [x.new_ones(x.shape[0], 6)]
        for x_t in reversed(x.unbind(1)):
            h = self.cell(x_t, h)
            outs.insert(0, h)
        return torch.stack(outs, 1), h

    def last_only(self, x, memory):
        h = x.new_zeros(x.shape[0], 6)
        for t in range(x.shape[1]):
            h = self.cell(x[:, t], h)
            out = self.out(h)
        return out.view(-1), h

    def written_to_later(self, x, memory):
        h, outs = x.new_zeros(x.shape[0], 6), []
        for t in range(x.shape[1]):
            h = self.cell(x[:, t], h)
            outs.append(h * 2)
        outs[-1].mul_(3)
        return torch.stack(outs, 1).view(-1), outs[0].view(-1)

    def decoding(self, x, memory):
        h, inp, outs = x[:, 0].repeat(1, 2), x[:, 0], []
        for _ in range(x.shape[1]):
            h = self.cell(inp, h)
            inp = self.out(h)
            outs.append(inp)
        return torch.cat(outs, 1), h

    def attending(self, x, memory):
        h, outs, weights = x.new_zeros(x.shape[0], 6), [], []
        for t in range(x.shape[1]):
            weight = torch.softmax((memory * h.unsqueeze(1)).sum(2), 1)
            h = self.cell(x[:, t], h + (weight.unsqueeze(2) * memory).sum(1))
            outs.append(h)
            weights.append(weight)
        return torch.stack(outs, 1), torch.stack(weights, 1)


STYLES = {name: style for name, style in vars(Several).items() if not name.startswith("_")}


def in_style(name):
    torch.manual_seed(0)
    return type(name, (Several,), {"forward": STYLES[name]})()


@pytest.mark.parametrize("style", STYLES)
def test_however_turns_leave_things_behind_they_lie_where_and_as_the_loop_leaves_them(style, x):
    model = in_style(style)
    twin = copy.deepcopy(model)
    with hs.accelerate(model) as faster:
        for steps, width in ((8, 5), (8, 5), (6, 5), (8, 4), (8, 4), (8, 5)):  # a memory of another size, too
            found = []
            for each in (model, twin):
                each.zero_grad()
                inp = x[:, :steps].clone().requires_grad_()
                memory = torch.linspace(-1, 1, 3 * width * 6).view(3, width, 6)
                out = each(inp, memory)
                sum((value * torch.arange(value.numel()).view(value.shape)).sum() for value in out).backward()
                strides = [torch.tensor(value.stride()) for value in out]
                found.append([*out, inp.grad, *(p.grad for p in each.parameters() if p.grad is not None), *strides])
            assert all(torch.allclose(a, b, rtol=1e-4, atol=1e-4) for a, b in zip(*found, strict=True))
        assert "by the engine" in faster.explain()


def test_a_hook_is_called_once_for_each_turn_also_where_the_first_makes_the_state(x):
    model, seen = in_style("unbound_start"), []
    with hs.accelerate(model) as faster:
        for _ in range(3):
            model(x)
        assert "by the engine" in faster.explain()
        model.cell.register_forward_hook(lambda *_: seen.append(1))
        model(x)
    assert len(seen) == x.shape[1]


def test_what_is_said_of_a_turn_names_the_users_own_names(x):
    class Growing(nn.Module):
        def forward(self, x):
            h, memory = x[:, 0], [x[:, 0]]
            for t in range(x.shape[1]):
                h = torch.tanh(x[:, t] + h + torch.stack(memory).mean(0))
                memory.append(h)
            return h

    model = Growing()
    with hs.accelerate(model) as faster:
        model(x)
        assert faster.explain().endswith("left alone: it changes 'memory' at every step"), faster.explain()


class HandsOut(Gated):
    def forward(self, x, h=None):
        h, outs = x.new_zeros(x.shape[0], 6), []
        for t in range(x.shape[1]):
            h = self.step(x[:, t], h)
            outs.append(h)
        return outs


class Asks(Gated):
    def forward(self, x, h=None):
        h, outs = x.new_zeros(x.shape[0], 6), []
        for t in range(x.shape[1]):
            h = self.step(x[:, t], h)
            outs.append(h)
        return torch.autograd.grad(outs[-1].sum(), outs)


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        (HandsOut, r"states of single turns are handed out in 'outs', and gradients may be asked for \(line \d+\)"),
        (Asks, r"gradients at single turns may be asked for \(line \d+\)"),
    ],
)
def test_where_gradients_at_single_turns_may_be_asked_for_the_loop_stays(kind, reason, x):
    torch.manual_seed(0)
    model = kind()
    expected = model(x)
    with hs.accelerate(model) as faster:
        for _ in range(3):
            assert same(model(x), expected)
        assert re.search(f"left alone: {reason}$", faster.explain())


class Together(nn.Module):
    """Two loops and a fused layer, with a start of its own."""

    def __init__(self):
        super().__init__()
        self.rnn, self.cell, self.into = nn.GRU(3, 6, batch_first=True), nn.GRUCell(6, 6), nn.Linear(12, 6)

    def forward(self, x):
        y, _ = self.rnn(x)
        h, g, outs = x.new_zeros(x.shape[0], 6), x.new_zeros(x.shape[0], 6), []
        for t in range(y.shape[1]):
            h = self.cell(y[:, t], h)
            g = torch.tanh(self.into(torch.cat([h, g], 1)))
            outs.append(g)
        return torch.stack(outs, 1)


@pytest.mark.slow
def test_carried_recorded_watched_and_diagnosed_an_accelerated_model_is_as_without_it():
    def seen(model):
        x, found = torch.randn(3, 24, 3, generator=torch.Generator().manual_seed(0)), []
        for override in (False, True):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of the start that the model makes itself
                with hs.Carry(model, override=override) as carry:
                    for _ in range(2):
                        found += [model(piece) for piece in x.split(6, 1)]
                        carry.reset()
        for _ in range(3):
            with hs.record(model) as recorded:
                found.append(model(x))
            found += [recorded[name].h for name in ("rnn", "cell")]
        with hs.Monitor(model):
            model(x).sum().backward()
        found += [parameter.grad for parameter in model.parameters()]
        torch.manual_seed(0)
        return found, sorted(finding.code for finding in hs.diagnose(model, x))

    torch.manual_seed(0)
    model = Together()
    twin = copy.deepcopy(model)
    expected, codes = seen(model)
    with hs.accelerate(twin) as faster:
        for _ in range(3):
            twin(torch.randn(3, 24, 3)).sum().backward()
        twin.zero_grad()
        assert "by the engine" in faster.explain()
        found, ours = seen(twin)
    assert all(torch.allclose(a, b, atol=1e-4) for a, b in zip(found, expected, strict=True))
    assert ours == codes
