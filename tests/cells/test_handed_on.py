"""Whether a call goes on from the one before."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import hiddenstate as hs
from hiddenstate.cells import Call, EndState, Succession

MADE_OF = {
    "itself": lambda h: h,
    "detached": lambda h: h.detach(),
    "a copy": lambda h: h.detach().clone(),
    "a view": lambda h: h[1:],
    "expanded": lambda h: h[:1].expand(4, 8),
    "a mask of rows": lambda h: h.detach() * torch.tensor([1.0, 0, 0, 1]).unsqueeze(1),
    "dropout": lambda h: h.detach() * (torch.arange(32).view(4, 8) % 3 > 0) / 0.7,
    "other rows put in": lambda h: torch.where(torch.tensor([[True], [False], [True], [True]]), h.detach(), 0.3),
    "something of its graph": lambda h: torch.layer_norm(h, (8,)) + torch.randn(4, 8),
}


@pytest.mark.parametrize("how", MADE_OF)
def test_a_state_is_recognized_in_what_was_made_of_it(how):
    made = torch.randn(4, 8, requires_grad=True).tanh()
    end = EndState.of((made,))
    assert end.handed_on((MADE_OF[how](made),))
    assert not end.handed_on((torch.randn(4, 8),))


@settings(max_examples=100, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    start=st.sampled_from([torch.randn, torch.rand, torch.zeros, torch.ones]),
    dtype=st.sampled_from([torch.float32, torch.float64, torch.bfloat16, torch.float16]),
    shape=st.sampled_from([(1, 1), (1, 4), (4, 8), (16, 32)]),
)
def test_a_fresh_start_is_never_taken_for_the_last_state(seed, start, dtype, shape):
    torch.manual_seed(seed)
    end = EndState.of(torch.randn(shape).tanh().to(dtype))
    assert not end.handed_on(start(shape).to(dtype)) or (shape == (1, 1) and dtype.itemsize < 4)


def test_it_keeps_no_graph_alive():
    class Held(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.held = held = nn.Module()
            alive.append(weakref.ref(held))
            return x * 2

        @staticmethod
        def backward(ctx, grad):
            return grad

    alive = []
    end = EndState.of(Held.apply(torch.randn(2, 3, requires_grad=True)))
    gc.collect()
    assert alive[0]() is None
    assert end.mark is not None


def calls(cell, states):
    (layer,) = hs.layers(cell)
    for state in states:
        x = torch.randn(2, 3)
        args = (x,) if state is None else (x, state)
        yield Call(layer, args, {}, cell(*args))


def test_calls_from_outside_with_one_state_are_counted_and_told():
    cell, succession, h = nn.GRUCell(3, 4), Succession(), torch.randn(2, 4)
    for number, call in enumerate(calls(cell, [h, h, h.clone(), torch.zeros(2, 4), None])):
        assert not succession.goes_on(call, number)
        succession.ended(call, number)
    assert "called 3 times with the same state" in str(succession.complaint())


def test_within_one_call_of_the_model_leaves_of_a_tree_may_start_alike():
    cell, succession = nn.GRUCell(3, 4), Succession()
    for call in calls(cell, [torch.zeros(2, 4)] * 5):
        assert not succession.goes_on(call, 7)
        succession.ended(call, 7)
    assert succession.complaint() is None


def test_within_one_call_of_the_model_a_state_may_be_changed_by_anything():
    cell, succession = nn.GRUCell(3, 4), Succession()
    with torch.no_grad():
        first, second, third = calls(cell, [torch.ones(2, 4), torch.randn(2, 4), torch.ones(2, 4)])
    assert not succession.goes_on(first, 0)
    succession.ended(first, 0)
    assert succession.goes_on(second, 0)
    assert not succession.goes_on(third, 0)  # where the run began
    assert not succession.goes_on(second, 1)  # from outside it has to be recognized


def test_a_layer_that_is_called_in_a_way_of_its_own_is_left_alone():
    class Own(nn.GRU):
        def forward(self, *, sequence):
            return super().forward(sequence)[0].sum()

    layer, succession = Own(3, 4), Succession()
    call = Call(hs.layers(nn.GRU(3, 4))[0], (), {"sequence": torch.randn(5, 2, 3)}, torch.zeros(()))
    for number in range(5):
        assert not succession.goes_on(call, number)
        succession.ended(call, number)
    assert succession.complaint() is None
    with hs.Monitor(layer, every=1) as monitor:
        for _ in range(4):
            layer(sequence=torch.randn(5, 2, 3)).backward()
    assert monitor.step == 4
