"""Truncated BPTT: gradients of each piece through the last k2 steps, in memory bounded by k2."""

from __future__ import annotations

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from hiddenstate.carry import Carry, Learned, tbptt
from hiddenstate.errors import BadInput, CarryError
from tests.support.models import Deep, Stepping, TimeFirst


def loss_of(out, y):
    return (out - y).square().mean()


def by_hand(model, x, y, k1, k2, update):
    """The slow, obvious way: for every update run from the start, cut k2 steps before its end."""
    losses, states = [], {0: None}
    steps = x.shape[1]
    for begin in range(0, steps, k1):
        end = min(begin + k1, steps)
        oldest = max(0, end - k2)
        state = states[oldest]
        outs = []
        for t in range(oldest, end):
            state = model.cell(x[:, t], state)
            if t + 1 not in states:
                states[t + 1] = tuple(part.detach() for part in state)
            if t >= begin:
                outs.append(state[0])
        loss = loss_of(model.head(torch.stack(outs, dim=1)), y[:, begin:end])
        loss.backward()
        losses.append(loss.detach())
        update()
    return losses


@settings(max_examples=40)
@given(steps=st.integers(1, 13), k1=st.integers(1, 5), more=st.integers(0, 9), learn=st.booleans())
def test_losses_and_gradients_equal_the_obvious_way(steps, k1, more, learn):
    model = Stepping(nn.LSTMCell(3, 4)).double()
    twin = copy.deepcopy(model)
    x, y = torch.randn(2, steps, 3, dtype=torch.float64), torch.randn(2, steps, 2, dtype=torch.float64)
    optimizers = [torch.optim.SGD(net.parameters(), 0.3 if learn else 0.0) for net in (model, twin)]
    grads: list[list[torch.Tensor]] = [[], []]

    def update(which, net):
        grads[which].append(torch.cat([p.grad.flatten() for p in net.parameters()]))
        optimizers[which].step()
        optimizers[which].zero_grad()

    losses = []
    for loss in tbptt(model, x, y, loss_of, k1=k1, k2=k1 + more):
        assert not loss.requires_grad
        losses.append(loss)
        update(0, model)
    expected = by_hand(twin, x, y, k1, k1 + more, lambda: update(1, twin))
    assert len(losses) == -(-steps // k1)
    torch.testing.assert_close(torch.stack(losses), torch.stack(expected))
    torch.testing.assert_close(torch.stack(grads[0]), torch.stack(grads[1]))


def test_one_piece_over_all_steps_is_plain_backpropagation():
    model = Deep().double()
    x, y = torch.randn(2, 7, 3, dtype=torch.float64), torch.randn(2, 7, 2, dtype=torch.float64)
    loss_of(model(x), y).backward()
    expected = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    assert len(list(tbptt(model, x, y, loss_of, k1=7))) == 1
    for parameter, grad in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, grad)


class Counting:
    """Counts the bytes that autograd holds for the backward pass."""

    def __init__(self):
        self.now, self.peak = 0, 0

    def pack(self, tensor):
        size = tensor.numel()
        self.now += size
        self.peak = max(self.peak, self.now)
        counter = self

        class Held:
            def __del__(self):
                counter.now -= size

        return tensor, Held()

    def unpack(self, packed):
        return packed[0]


@pytest.mark.parametrize(("k1", "k2"), [(5, 5), (5, 10), (3, 7)])
def test_memory_is_bounded_by_k2_however_long_the_sequence(k1, k2):
    peaks = []
    for steps in (30, 90):
        model = Stepping(nn.GRUCell(3, 4))
        counter = Counting()
        with torch.autograd.graph.saved_tensors_hooks(counter.pack, counter.unpack):
            for _ in tbptt(model, torch.randn(2, steps, 3), torch.randn(2, steps, 2), loss_of, k1=k1, k2=k2):
                assert counter.now == 0
        peaks.append(counter.peak)
    assert peaks[0] == peaks[1]


def test_an_attached_carry_is_where_it_starts_and_where_it_ends():
    model, x, y = Deep(), torch.randn(2, 6, 3), torch.randn(2, 6, 2)
    with Carry(model) as carry:
        model(x)
        model(x)
        expected = carry.state
        carry.reset()
        model(x)
        for _ in tbptt(model, x, y, loss_of, k1=2, k2=4):
            pass
        for name in expected:
            torch.testing.assert_close(carry.state[name], expected[name])
            assert not carry.state[name].requires_grad
    assert sum(len(module._forward_hooks) for module in model.modules()) == 0


def test_a_learned_initial_state_is_reached_by_as_many_updates_as_k2_allows():
    model, x, y = Stepping(nn.GRUCell(3, 4)), torch.randn(2, 6, 3), torch.randn(2, 6, 2)
    learned = Learned(model)
    reached = []
    with Carry(model, init=learned):
        for _ in tbptt(model, x, y, loss_of, k1=2, k2=4):
            grad = learned.rows["cell/h"].grad
            reached.append(grad is not None and bool(grad.any()))
            learned.zero_grad()
    assert reached == [True, True, False]


def test_it_leaves_the_model_as_it_was_when_the_loss_raises():
    model, x, y = Deep(), torch.randn(2, 6, 3), torch.randn(2, 6, 2)

    def broken(out, y):
        raise ArithmeticError("in the loss")

    with pytest.raises(ArithmeticError, match="in the loss"):
        list(tbptt(model, x, y, broken, k1=2))
    assert sum(len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules()) == 0
    updates = tbptt(model, x, y, loss_of, k1=2)
    next(updates)
    updates.close()
    assert sum(len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules()) == 0


def test_time_first_models_say_so():
    model, x, y = TimeFirst(), torch.randn(6, 2, 3), torch.randn(6, 2, 2)
    losses = list(tbptt(model, x, y, lambda out, y: loss_of(out[0], y), k1=4, time_axis=0))
    assert len(losses) == 2


def test_bad_arguments_are_refused_before_anything_runs():
    model, x, y = Deep(), torch.randn(2, 6, 3), torch.randn(2, 6, 2)
    for arguments, message in [
        ((x, y, {"k1": 0}), r"k1 is 0, but an update needs 1 step or more"),
        ((x, y, {"k1": 4, "k2": 2}), r"k2 is 2 and k1 is 4.*k2 >= k1"),
        ((x, y[:, :5], {"k1": 2}), r"x has shape \(2, 6, 3\) and y \(2, 5, 2\).*time on axis 1.*time_axis="),
        ((x[:, :0], y[:, :0], {"k1": 2}), r"there is no step to train on"),
    ]:
        with pytest.raises(BadInput, match=message):
            tbptt(model, arguments[0], arguments[1], loss_of, **arguments[2])


class LooksLikeACell(nn.Module):
    """It bears the names of a cell, and runs along time."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden_size, self.mix = 4, nn.Linear(3 + 4, 4)

    def forward(self, x, state=None):
        h, out = x.new_zeros(len(x), 4) if state is None else state, []
        for frame in x.unbind(1):
            h = torch.tanh(self.mix(torch.cat([frame, h], -1)))
            out.append(h)
        return torch.stack(out, 1)


def test_what_only_bears_the_names_of_a_cell_is_run_along_time():
    model, x, y = LooksLikeACell(), torch.randn(2, 12, 3), torch.zeros(2, 12, 4)
    with Carry(model, override=True):
        assert len(list(tbptt(model, x, y, loss_of, k1=4))) == 3
    with pytest.raises(BadInput, match="GRUCell takes one step at a time"):
        next(tbptt(nn.GRUCell(3, 4), x, y, loss_of, k1=4))


class LearnedStart(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.h0 = nn.GRU(3, 4, batch_first=True), nn.Parameter(torch.randn(1, 1, 4))

    def forward(self, x):
        return self.rnn(x, self.h0.expand(-1, len(x), -1).contiguous())[0]


def test_a_model_with_a_start_of_its_own_is_refused_before_a_gradient_is_wrong():
    model, x = LearnedStart(), torch.randn(2, 12, 3)
    losses = tbptt(model, x, torch.randn(2, 12, 4), lambda out, y: (out - y).square().mean(), k1=4)
    next(losses)
    with pytest.raises(CarryError, match=r"handed a state that is not the carried one by the model itself.*override"):
        next(losses)


def test_a_carry_that_overrides_lets_it_be_trained():
    model, x, y = LearnedStart(), torch.randn(2, 12, 3), torch.randn(2, 12, 4)
    with Carry(model, override=True):
        found = list(tbptt(model, x, y, lambda out, y: (out - y).square().mean(), k1=4))
    with torch.no_grad():
        whole = (model(x) - y).square().mean()
    torch.testing.assert_close(torch.stack(found).mean(), whole)


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_a_loss_that_takes_no_tuple_is_told_what_it_got(kind):
    layer, x, y = kind(3, 4, batch_first=True), torch.randn(2, 8, 3), torch.randn(2, 8, 4)
    message = r"the loss failed on what \w+ returned, which is a tuple: .*loss=lambda out, y: your_loss\(out\[0\], y\)"
    with pytest.raises(BadInput, match=message):
        next(tbptt(layer, x, y, nn.functional.mse_loss, k1=4))
    assert Carry.of(layer) is None
    losses = list(tbptt(layer, x, y, lambda out, y: nn.functional.mse_loss(out[0], y), k1=4))
    assert len(losses) == 2
