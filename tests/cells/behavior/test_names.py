"""What the code calls a tensor: the variable that goes on, else an attribute, a key, a place in a list."""

from __future__ import annotations

import sys
from collections import OrderedDict, deque
from dataclasses import dataclass
from typing import NamedTuple

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from hiddenstate.cells.behavior.names import Binding, Namer, held_in_frame, module_tensors, names_in_forward, tensors_in
from hiddenstate.cells.behavior.trace import Trace


class Fields(NamedTuple):
    h: Tensor
    rest: object


@dataclass
class State:
    h: Tensor


class Own:
    def __init__(self, h):
        self.h = h


def named(value) -> dict[str, Tensor]:
    return dict(tensors_in(value, "v"))


def test_a_key_or_field_is_a_name_and_a_place_in_a_list_is_one_of_the_lists():
    h = torch.ones(1)
    assert named(h) == {"v": h}
    assert named({"h": h, "n": 3}) == {"h": h}
    assert named(OrderedDict(h=[h])) == {"h[0]": h}
    assert named([h, (h,)]) == {"v[0]": h, "v[1][0]": h}
    assert named(deque([h])) == {"v[0]": h}
    assert named(Fields(h, None)) == named(State(h)) == named(Own(h)) == {"h": h}


def test_parameters_modules_and_what_lies_too_deep_are_no_states():
    assert named([nn.Parameter(torch.ones(1)), nn.Linear(1, 1), "h", None, 3.0]) == {}
    deep = torch.ones(1)
    for _ in range(9):
        deep = [deep]
    assert named(deep) == {}


def test_a_mapping_that_fails_when_it_is_read_has_nothing_to_say():
    class Broken(dict):
        def items(self):
            raise KeyError("no")

    assert named(Broken(h=torch.ones(1))) == {}


def test_a_module_keeps_buffers_and_attributes_but_not_parameters():
    module = nn.Linear(1, 1)
    module.register_buffer("mean", torch.zeros(1))
    module.register_buffer("none", None)
    module.h, module.past = torch.ones(1), {"c": torch.ones(1)}
    assert [name for name, _ in module_tensors(module)] == ["mean", "h", "c"]


def test_a_variable_that_goes_on_wins_over_an_attribute_and_that_over_others():
    module = nn.Module()
    module.h = torch.ones(1)

    def frame():
        state = other = module.h
        listed = [torch.ones(1)]
        alone = listed[0]
        return sys._getframe(), state, other, listed, alone, module

    inner, state, _, _, alone, _ = frame()
    assert held_in_frame(inner, ("state",))[id(state)] == Binding("state")
    assert held_in_frame(inner, ())[id(state)] == Binding("h", module)
    assert held_in_frame(inner, ())[id(alone)] == Binding("alone")


def test_a_modules_own_code_names_its_arguments():
    class Cell(nn.Module):
        def forward(self, x, h):
            return names_in_forward(sys._getframe(), self), names_in_forward(sys._getframe(), nn.Module())

    x, h = torch.ones(1), torch.zeros(1)
    own, others = Cell()(x, h)
    assert own == {id(x): "x", id(h): "h"}
    assert others == {}


@given(st.lists(st.sampled_from(["h", "c", "h_2", "state"]), max_size=8))
def test_no_two_parts_have_the_same_name(names):
    namer = Namer({}, Trace(sys._getframe()))
    given_ = [namer.name([], name) for name in names]
    assert len(set(given_)) == len(names)
    assert all(given_name.startswith(name) for given_name, name in zip(given_, names, strict=True))


def test_parts_are_called_as_they_are_held_and_the_last_of_a_growing_list_by_the_lists_name():
    trace = Trace(sys._getframe())
    values = [trace.memory.new(-1, "made", torch.ones(1)) for _ in range(2)]
    one, two = (id(value.tensor) for value in values)
    assert Namer({2: {two: Binding("h")}}, trace).name(list(values), "state0") == "h"
    assert Namer({}, trace).name(list(values), "state0") == "state0"
    assert Namer({}, trace).name(list(values), "state0", "inner") == "inner"
    growing = Namer({1: {one: Binding("outs[0]")}, 2: {one: Binding("outs[0]"), two: Binding("outs[1]")}}, trace)
    assert growing.name(list(values), "state0") == "outs"
    assert growing.listed(values[0]) == "outs"
