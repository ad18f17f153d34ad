"""A trace cut into repetitions, and what depends on what: laws on random graphs of operations."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from hiddenstate.cells.behavior.repetition import (
    Windows,
    from_input,
    owner_of,
    reached,
    reaching,
    signature,
    used_after,
    where_of,
    windows_of,
)

from .noting import run

B, H = 2, 3


class Graph(nn.Module):
    """Adds earlier results, by number; each operation reads one or two of them."""

    def __init__(self, pairs: list[tuple[int, int]]) -> None:
        super().__init__()
        self.pairs = pairs

    def forward(self, x):
        made = [x, torch.ones(3)]
        for a, b in self.pairs:
            made.append(torch.add(made[a % len(made)], made[b % len(made)]))
        return made[-1]


graphs = st.lists(st.tuples(st.integers(0, 50), st.integers(0, 50)), min_size=1, max_size=12)


@given(graphs)
def test_what_reaches_a_value_is_what_it_is_reached_from(pairs):
    trace, _ = run(Graph(pairs), (torch.ones(3),), {})
    span = (0, len(trace.ops))
    for target in range(len(trace.ops)):
        behind = reaching(trace, trace.ops[target].outs, span)
        for source in range(target):
            numbers = {value.number for value in trace.ops[source].outs}
            assert (source in behind) == (target in reached(trace, numbers, (source + 1, len(trace.ops))))


@given(graphs)
def test_what_depends_on_the_input_is_told_by_the_input(pairs):
    trace, _ = run(Graph(pairs), (torch.full((3,), 0.1),), {})
    marks = from_input(trace)
    other, _ = run(Graph(pairs), (torch.full((3,), 0.3),), {})
    for op, same in zip(trace.ops, other.ops, strict=True):
        for value, twin in zip(op.outs, same.outs, strict=True):
            assert bool(marks[value.number]) == (not torch.equal(value.tensor, twin.tensor))


def test_random_draws_move_a_value_only_where_they_are_asked_for():
    model = nn.Sequential(nn.Identity())
    model.forward = lambda x: torch.randn(3).mul(2)
    trace, _ = run(model, (torch.ones(3),), {})
    last = trace.ops[-1].outs[0].number
    assert not from_input(trace)[last]
    assert from_input(trace, draws=True)[last]


class Elman(nn.Module):
    def __init__(self, short: bool = False, late: bool = False) -> None:
        super().__init__()
        self.mix, self.short, self.late = nn.Linear(2 * H, H), short, late

    def forward(self, x):
        h = before = x.new_zeros(len(x), H)
        for t in range(x.shape[1]):
            step = x[:, t]
            if self.short and t == x.shape[1] - 1:
                break
            before, h = h, torch.tanh(self.mix(torch.cat([step, h], 1)))
        return before if self.late else h


def windows(steps: int, **how: bool) -> Windows:
    with torch.no_grad():
        trace, _ = run(Elman(**how), (torch.randn(B, steps, H),), {})
    (loop,) = [s for s in trace.places.scopes if s.kind == "loop" and s.code is Elman.forward.__code__]
    return windows_of(trace, loop)


@given(st.integers(2, 6))
def test_repetitions_share_all_operations_of_a_loop_among_them(steps):
    found = windows(steps)
    spans = [found.span(turn) for turn in range(found.count)]
    assert spans[0][0] == found.scope.start
    assert spans[-1][1] == found.scope.end
    assert all(one[1] == other[0] for one, other in pairwise(spans))
    for turn, span in enumerate(spans):
        assert {found.turn(op) for op in range(*span)} == {turn}
        assert [number for number, _ in found.of_turn(turn)] == list(range(*span))
    assert found.turn(spans[0][0] - 1) == -1


@given(st.integers(2, 6))
def test_an_operation_has_the_same_place_in_every_repetition(steps):
    found = windows(steps)
    places = [[found.place(number) for number, _ in found.of_turn(turn)] for turn in range(found.count)]
    assert all(each == places[0] for each in places)
    assert len(set(places[0])) == len(places[0])


def test_a_last_turn_that_was_broken_off_is_left_out():
    assert windows(5).count == 5
    assert windows(5, short=True).count == 4
    assert windows(5, late=True).count == 5  # whole, if for nobody


def test_where_a_loop_is_and_what_is_read_after_it():
    found = windows(4)
    first = Elman.forward.__code__.co_firstlineno
    assert where_of(found) == ("", f"test_repetition.py:{first + 2}")
    span = (found.starts[0], found.end)
    (result,) = (value for _, value in found.trace.calls[0].results)
    assert used_after(found.trace, span) == {result.number}
    assert owner_of(found.trace, *span) is found.trace.calls[0]


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ((torch.ones(1), 2), (torch.zeros(3), 2), True),
        ((slice(0, 2),), (slice(0, 3),), False),
        (([1, None, "a"],), ((1, None, "a"),), True),
        ((object(),), (object(),), True),
        ((1.0,), (2.0,), False),
    ],
)
def test_a_signature_is_all_but_the_tensors(one, other, same):
    assert (signature(one) == signature(other)) is same
