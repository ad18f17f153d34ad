"""Modules that are handed what they gave before: which calls go on from which, and through what."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from hiddenstate.cells.behavior.chains import Chain, chains_of

from .noting import run

B, H = 3, 4


class Cell(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(2 * H, H)

    def forward(self, x, h):
        return torch.tanh(self.mix(torch.cat([x, h], 1)))


class Stepped(nn.Module):
    """Steps a cell, or several that are the same one, through whatever `between` does to the state."""

    def __init__(self, layers: int = 1, between=lambda h, t: h) -> None:
        super().__init__()
        self.cell, self.layers, self.between = Cell(), layers, between

    def forward(self, x):
        states = [x.new_zeros(len(x), H) for _ in range(self.layers)]
        for t, step in enumerate(x.unbind(1)):
            for depth in range(self.layers):
                states[depth] = step = self.cell(step, self.between(states[depth], t))
        return step


def chains(model: nn.Module, steps: int) -> list[Chain]:
    with torch.no_grad():
        trace, _ = run(model, (torch.randn(B, steps, H),), {})
    return [chain for chain in chains_of(trace) if isinstance(chain.module, Cell)]


@given(st.integers(2, 6))
def test_each_call_goes_on_from_the_one_before(steps):
    (chain,) = chains(Stepped(), steps)
    assert (chain.path, len(chain.calls)) == ("cell", steps)
    (place,) = chain.parts
    assert place == ("args", 1)
    given_back = [dict(call.results)[()] for call in chain.calls]
    assert chain.values(place) == given_back  # the same values, not only equal ones
    assert not chain.initial(place).tensor.any()
    assert {value.number for value in given_back[:-1]} <= chain.on_the_way


@given(st.integers(2, 3), st.integers(3, 5))
def test_one_cell_for_several_layers_is_a_chain_for_each_of_them(layers, steps):
    found = chains(Stepped(layers), steps)
    assert [len(chain.calls) for chain in found] == [steps] * layers
    numbers = [call.number for chain in found for call in chain.calls]
    assert len(set(numbers)) == len(numbers)  # each call is of one of them


MOVED = {
    "detached": lambda h, t: h.detach(),
    "copied": lambda h, t: h.clone().contiguous(),
    "reshaped": lambda h, t: h.reshape(1, B, H).squeeze(0),
    "in two halves": lambda h, t: torch.cat(h.chunk(2, 1), 1),
    "masked by where": lambda h, t: torch.where(torch.arange(B).unsqueeze(1) < 2, h, torch.zeros(1)),
    "masked by a product": lambda h, t: h * (torch.arange(B).unsqueeze(1) < 2),
}
MADE = {
    "scaled": lambda h, t: 2 * h,
    "squashed": lambda h, t: torch.tanh(h),
    "with a number added": lambda h, t: h + 1,
    "begun anew": lambda h, t: torch.zeros(B, H),
}


@pytest.mark.parametrize("between", MOVED.values(), ids=MOVED)
def test_what_is_only_moved_or_masked_is_still_what_it_gave(between):
    (chain,) = chains(Stepped(between=between), 5)
    assert len(chain.calls) == 5
    assert list(chain.parts) == [("args", 1)]


@pytest.mark.parametrize("between", MADE.values(), ids=MADE)
def test_what_is_made_of_it_is_something_else(between):
    assert chains(Stepped(between=between), 5) == []


def test_where_the_state_begins_anew_a_chain_begins_anew():
    found = chains(Stepped(between=lambda h, t: h if t != 3 else torch.zeros(B, H)), 6)
    assert [len(chain.calls) for chain in found] == [3, 3] or found == []  # in one loop they are one window


def test_only_what_masks_is_said_to_be_blended():
    def blended(between):
        (chain,) = chains(Stepped(between=between), 4)
        return [link.blended for links in chain.parts.values() for link in links]

    assert blended(MOVED["detached"]) == [False] * 3
    assert blended(MOVED["masked by where"]) == [True] * 3


def test_a_module_that_is_called_once_or_beside_itself_is_no_chain():
    class Beside(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell = Cell()

        def forward(self, x):
            h = x.new_zeros(len(x), H)
            return sum(self.cell(step, h) for step in x.unbind(1))

    assert chains(Stepped(), 1) == []
    assert chains(Beside(), 4) == []
