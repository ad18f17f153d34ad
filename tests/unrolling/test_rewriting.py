"""A rewritten step gives the same numbers, and less of it depends on the state."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import hiddenstate as hs
from tests.support.equal import assert_same, inputs_of


class Joined(nn.Module):
    """A cell that joins what it is given before it multiplies: the way many write theirs."""

    hidden_size = 6

    def __init__(self, order):
        super().__init__()
        self.order = order
        self.gates = nn.Linear(4 * order.count("x") + 6 * order.count("h"), 12)

    def forward(self, x, h):
        gate, new = self.gates(torch.cat([{"x": x, "h": h}[name] for name in self.order], -1)).chunk(2, -1)
        return h + torch.sigmoid(gate) * (torch.tanh(new) - h)


@settings(deadline=None, max_examples=10)
@given(st.lists(st.sampled_from("xh"), min_size=1, max_size=4))
def test_any_order_of_joined_values_is_the_loops(order):
    cell, x = Joined(order).double(), torch.randn(3, 4, 4, dtype=torch.float64)
    assert_same(
        lambda: [hs.unroll(cell, x, engine="loop")[0]],
        lambda: [hs.unroll(cell, x, engine="fast")[0]],
        inputs_of(cell, x),
    )


@pytest.mark.parametrize("order", ["xh", "hx", "hxh"])
def test_the_products_with_inputs_leave_the_loop(order):
    shown = hs.explain(Joined(order), torch.randn(3, 4, 4, requires_grad=True))
    assert shown.stages["before the loop"].count("mm") == 1
    assert shown.stages["in the loop"].count("mm") == order.count("h")
    assert shown.stages["after the backward loop"].count("mm") >= 1


def test_a_join_of_states_alone_stays_one_product():
    shown = hs.explain(Joined("hh"), torch.randn(3, 4, 4))
    assert shown.stages["in the loop"].count("mm") == 1


def test_pieces_that_overlap_stay_one_product():
    class Overlapping(Joined):
        def forward(self, x, h):
            both = torch.cat([x, h], -1) @ self.gates.weight.T
            return torch.tanh(both[:, :6] + both[:, 4:10])

    cell, x = Overlapping("xh").double(), torch.randn(3, 4, 4, dtype=torch.float64)
    assert_same(
        lambda: [hs.unroll(cell, x, engine="loop")[0]],
        lambda: [hs.unroll(cell, x, engine="fast")[0]],
        inputs_of(cell, x)[:1],
    )


class Spike(torch.autograd.Function):
    """A step function with a slope of the user's own."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return (x > 0).to(x.dtype)

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return grad / (1 + (math.pi * x).square())


class Spiking(nn.Module):
    """A leaky integrator, whose decay is kept within bounds."""

    hidden_size = 4

    def __init__(self):
        super().__init__()
        self.inner, self.decay = nn.Linear(3, 4), nn.Parameter(torch.tensor(0.9))

    def forward(self, x, h):
        h = self.decay.clamp(0, 1) * h + self.inner(x) - Spike.apply(h - 1).detach()
        return Spike.apply(h - 1), h


def test_what_derivatives_write_into_values_of_their_own_is_a_new_value():
    cell, x = Spiking().double(), torch.randn(3, 6, 3, dtype=torch.float64)

    def run(engine):
        out, state = hs.unroll(cell, x, lengths=[6, 2, 4], engine=engine)
        return [out, *state.values()]

    assert_same(lambda: run("fast"), lambda: run("loop"), inputs_of(cell, x))
