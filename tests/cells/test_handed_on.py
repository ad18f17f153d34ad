"""Whether a state is the one in which a call ended, or was made of it."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from hiddenstate.cells import EndState

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


def test_several_who_listen_to_one_layer_each_recognize_its_state_by_its_graph():
    made = torch.randn(4, 8, requires_grad=True).tanh()
    ends = [EndState.of(made) for _ in range(3)]
    assert all(end.handed_on(torch.layer_norm(made, (8,))) for end in ends)
