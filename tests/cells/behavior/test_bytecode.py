"""What bytecode tells of loops and their variables, in whatever version of Python."""

from __future__ import annotations

import dis
from types import SimpleNamespace

import pytest

from hiddenstate.cells.behavior.bytecode import Inlined, inlined_in, loops_of


def plain(xs, state):
    for x in xs:
        state = state + x
    return state


def set_again(xs, state):
    for x in xs:
        x = x + 1
        state = state + x
    return state


def with_attribute_of_the_same_name(self, xs):
    for x in xs:
        self.x = x


def numbered(xs, state):
    for i, x in enumerate(xs):
        x = x + i
        state = state + x
    return state


def within(xs, state):
    for x in xs:
        state = [part + x for part in state]
    return state


def of_the_same_name(xs, state):
    for x in xs:
        state = [x for x in state]
    return state


@pytest.mark.parametrize(
    ("function", "targets", "lives"),
    [
        (plain, ("x",), {"state"}),
        (set_again, (), {"state"}),
        (with_attribute_of_the_same_name, ("x",), {"self"}),
        (numbered, ("i",), {"state"}),
        (within, ("x",), {"state"}),
        (of_the_same_name, ("x",), {"state"}),
    ],
)
def test_a_loop_counts_by_variables_of_its_own_and_goes_on_from_what_it_reads_first(function, targets, lives):
    outer = loops_of(function.__code__).loops[0]
    assert outer.targets == targets
    assert set(outer.lives) == lives


# state = [part + x for part in state], in a loop, as Python 3.12 compiles it.
PEP_709 = [
    (4, "FOR_ITER", 60),
    (8, "STORE_FAST", "x"),
    (10, "LOAD_FAST", "state"),
    (12, "GET_ITER", None),
    (14, "LOAD_FAST_AND_CLEAR", "part"),
    (16, "SWAP", 2),
    (18, "BUILD_LIST", 0),
    (20, "SWAP", 2),
    (22, "FOR_ITER", 42),
    (26, "STORE_FAST", "part"),
    (28, "LOAD_FAST", "part"),
    (30, "LOAD_FAST", "x"),
    (32, "BINARY_OP", 0),
    (36, "LIST_APPEND", 2),
    (38, "JUMP_BACKWARD", 22),
    (42, "END_FOR", None),
    (44, "SWAP", 2),
    (46, "STORE_FAST", "part"),
    (48, "STORE_FAST", "state"),
    (50, "JUMP_BACKWARD", 4),
    (60, "END_FOR", None),
]


def test_a_variable_of_an_inlined_comprehension_is_known_where_it_is_bound():
    code = [SimpleNamespace(offset=offset, opname=name, argval=value) for offset, name, value in PEP_709]
    assert inlined_in(code) == (Inlined("part", 14, 46),)


def test_a_variable_of_a_comprehension_is_hidden_within_it_and_nowhere_else():
    loops = loops_of(within.__code__)
    inside = {i.offset for i in dis.get_instructions(within) if i.argval == "part" and i.opname.startswith("LOAD_FAST")}
    assert all(loops.hidden(offset) == {"part"} for offset in inside)
    assert loops.hidden(0) == set()
