"""Where operations happen: the turns of every loop, as the interpreter runs them."""

from __future__ import annotations

import functools
import itertools
import sys

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from hiddenstate.cells.behavior.places import Scope, in_torch, is_between, line_of

from .noting import run


class Model(nn.Module):
    """Runs a function of one tensor."""

    def __init__(self, function) -> None:
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x)


def traced(function):
    with torch.no_grad():
        return run(Model(function), (torch.ones(4, 3),), {})[0]


def own_loops(trace) -> list[Scope]:
    return [scope for scope in trace.places.scopes if scope.kind == "loop" and scope.code.co_filename == __file__]


def loops(function) -> list[list[int]]:
    """For each loop that was run, the number of operations in each of its turns."""
    found = own_loops(traced(function))
    ends = [[*(turn.start for turn in loop.turns[1:]), loop.end] for loop in found]
    return [[b - a.start for a, b in zip(loop.turns, end, strict=True)] for loop, end in zip(found, ends, strict=True)]


@given(st.integers(1, 6), st.integers(1, 4))
def test_the_turns_of_a_for_loop_are_counted(turns, operations):
    def function(x):
        for _ in range(turns):
            for_each_turn(x, operations)
        return x

    assert loops(function) == [[operations] * turns]


def for_each_turn(x, operations):
    """Run some operations without a loop of ours: torch's own code is passed over."""
    list(map(x.__class__.exp, [x] * operations))


@given(st.lists(st.integers(1, 4), min_size=1, max_size=5))
def test_loops_in_loops_have_turns_of_their_own(lengths):
    def function(x):
        for _turn, length in enumerate(lengths):
            x = x * 1
            for _ in range(length):
                x = x.exp()
        return x

    outer, *inner = loops(function)
    assert outer == [1 + length for length in lengths]
    assert inner == [[1] * length for length in lengths]


def test_outer_turns_without_operations_of_their_own_are_told_apart():
    def function(x):
        for _row in range(2):
            for _column in range(3):
                x = x.exp()
        return x

    assert loops(function) == [[3, 3], [1, 1, 1], [1, 1, 1]]


def test_the_turns_of_a_while_loop_are_counted():
    def function(x):
        n = 0
        while n < 3:
            x = x.exp().log()
            n += 1
        return x

    def single(x):
        n = 0
        while n < 3:
            x = x.exp()
            n += 1
        return x

    assert loops(function) == [[2, 2, 2]]
    assert loops(single) == [[1, 1, 1]]


@given(st.integers(1, 4), st.integers(2, 4), st.booleans())
def test_a_loop_within_a_while_loop_does_not_begin_its_turns(outer, inner, own):
    def function(x):
        n = 0
        while n < outer:
            if own:
                x = x * 1
            for _ in range(inner):
                x = x.exp().log()
            n += 1
        return x

    assert loops(function) == [[2 * inner + own] * outer, *[[2] * inner] * outer]


@pytest.mark.xfail(
    sys.version_info >= (3, 12), reason="there the work of a generator is seen as a turn of its own", strict=True
)
def test_what_a_generator_does_for_a_turn_belongs_to_that_turn():
    def pieces(x):
        for row in x:
            yield row * 2

    def function(x):
        total = torch.zeros(3)
        for piece in pieces(x):
            total = total + piece
        return total

    trace = traced(function)
    loop = own_loops(trace)[0]
    ends = [*(turn.start for turn in loop.turns[1:]), loop.end]
    turns = [[trace.ops[n].name for n in range(turn.start, end)] for turn, end in zip(loop.turns, ends, strict=True)]
    assert turns[2:] == [["mul", "add"]] * 3


@given(st.lists(st.booleans(), min_size=2, max_size=6))
def test_turns_need_not_be_alike(skipped):
    def function(x):
        for skip in enumerate(skipped):
            x = x * 1
            if skip[1]:
                continue
            x = x.exp()
        return x

    assert loops(function) == [[1 if skip else 2 for skip in skipped]]


def test_several_operations_of_one_instruction_are_one_turn():
    def function(x):
        for _ in range(3):
            x = sum([x, x, x]) * 1
        return x

    assert loops(function) == [[4, 4, 4]]


def test_each_run_of_the_same_loop_is_a_loop():
    def run_once(x):
        for _ in range(2):
            x = x.exp()
        return x

    found = own_loops(traced(lambda x: run_once(run_once(x))))
    assert [len(loop.turns) for loop in found] == [2, 2]
    assert found[0].loop is found[1].loop


def test_loops_that_are_not_written_as_loops_are_seen():
    assert loops(lambda x: functools.reduce(lambda a, b: added(a, b), [x, x, x, x])) == [[1, 1, 1]]
    assert loops(lambda x: list(map(doubled, [x, x, x]))) == [[1, 1, 1]]
    assert loops(lambda x: list(itertools.accumulate([x, x, x, x], added))) == [[1, 1, 1]]


def added(a, b):
    return a + b


def doubled(a):
    return a * 2


@given(st.lists(st.integers(1, 3), min_size=1, max_size=4))
def test_scopes_are_a_tree_in_which_every_operation_has_its_place(lengths):
    def step(x):
        return x.exp() if len(lengths) % 2 else x.exp() * 1

    def function(x):
        for length in lengths:
            for _ in range(length):
                x = step(x)
        return x

    trace = traced(function)
    for number, op in enumerate(trace.ops):
        scope = op.scope
        while scope is not None:
            assert scope.start <= number < scope.end
            scope = scope.parent
    for loop in own_loops(trace):
        starts = [turn.start for turn in loop.turns]
        assert starts[0] == loop.start
        assert starts == sorted(set(starts))
        assert [turn.key for turn in loop.turns] == list(range(len(starts)))
        assert all(turn.parent is loop for turn in loop.turns)


def test_a_loop_is_named_by_the_users_line():
    def function(x):
        for _ in range(2):  # this one
            x = x.exp()
        return x

    (loop,) = own_loops(traced(function))
    first = function.__code__.co_firstlineno
    assert line_of(loop) == f"test_places.py:{first + 1}"


def test_what_only_stands_between_two_functions_of_the_users_has_no_place():
    trace = traced(lambda x: nn.Linear(3, 3)(x))
    assert not any(is_between(scope.code) for scope in trace.places.scopes[1:])
    assert is_between(nn.Module._wrapped_call_impl.__code__)
    assert not is_between(test_a_loop_is_named_by_the_users_line.__code__)
    assert in_torch(nn.Linear.forward.__code__)
    assert not in_torch(added.__code__)
