"""A stretch of a trace cut into repetitions, and the dependencies within them."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from torch import Tensor

from .memory import Value
from .operation import DRAWS, ModuleCall, Op
from .places import Scope, line_of
from .trace import Trace


@dataclass(eq=False, repr=False)
class Windows:
    """A stretch of the trace, cut into repetitions."""

    trace: Trace
    starts: list[int]
    end: int
    scope: Scope | None = None
    gaps: tuple[tuple[int, int], ...] = ()  # stretches between runs of the loop that continue each other

    @property
    def count(self) -> int:
        """The number of repetitions."""
        return len(self.starts)

    def span(self, turn: int) -> tuple[int, int]:
        """Return the first operation of a repetition, and one after its last."""
        return self.starts[turn], self.starts[turn + 1] if turn + 1 < self.count else self.end

    def between(self, op: int) -> bool:
        """Say whether an operation lies between two runs of the loop."""
        return any(start <= op < end for start, end in self.gaps)

    def turn(self, op: int) -> int:
        """Return the repetition of an operation; -1 before the first."""
        return bisect_right(self.starts, op) - 1

    @cached_property
    def places(self) -> list[int]:
        """For each operation, a number for its place within a repetition: calls, inner turns, instruction, count."""
        known: dict[Any, int] = {}
        scopes: dict[Scope, int] = {turn: 0 for turn in self.scope.turns} if self.scope is not None else {}

        def place(scope: Scope | None) -> int:
            if scope is None:
                return -1
            found = scopes.get(scope)
            if found is None:
                key = (place(scope.parent), scope.kind, scope.key, scope.code)
                found = scopes[scope] = known.setdefault(key, len(known) + 1)
            return found

        numbers: list[int] = []
        for turn in range(self.count):
            seen: Counter[Any] = Counter()
            for number in range(*self.span(turn)):
                op = self.trace.ops[number]
                key = (place(op.scope), op.offset, op.name)
                seen[key] += 1
                numbers.append(known.setdefault((*key, seen[key]), len(known) + 1))
        return numbers

    def place(self, op: int) -> int:
        """Return the number of an operation's place."""
        return self.places[op - self.starts[0]]

    def of_turn(self, turn: int) -> Iterator[tuple[int, Op]]:
        """Yield the operations of one repetition with their numbers."""
        for number in range(*self.span(turn)):
            yield number, self.trace.ops[number]


def windows_of(trace: Trace, loop: Scope) -> Windows:
    """Return the turns of a loop as repetitions, without an incomplete last one."""
    starts, end = [turn.start for turn in loop.turns], loop.end
    if len(starts) > 2:
        last = {(op.offset, op.name) for op in trace.ops[starts[-1] : end]}
        before = {(op.offset, op.name) for op in trace.ops[starts[-2] : starts[-1]]}
        short = last < before and 2 * (end - starts[-1]) < starts[-1] - starts[-2]
        if short and not used_after(trace, (starts[-1], end)):
            end = starts.pop()
    return Windows(trace, starts, end, loop)


def used_after(trace: Trace, span: tuple[int, int]) -> set[int]:
    """Return the values made within `span` that are read after it, or that a module returns after it."""
    made = {value.number for op in trace.ops[span[0] : span[1]] for value in op.outs}
    read = {value.number for op in trace.ops[span[1] :] for value in op.ins}
    given = {value.number for call in trace.calls if call.end >= span[1] for _, value in call.results}
    return made & (read | given)


def reaching(trace: Trace, targets: Iterable[Value], span: tuple[int, int]) -> set[int]:
    """Return the operations within `span` that some of these values depend on."""
    low, high = span
    todo = [value.op for value in targets if low <= value.op < high]
    seen: set[int] = set(todo)
    while todo:
        for value in trace.ops[todo.pop()].ins:
            if low <= value.op < high and value.op not in seen:
                seen.add(value.op)
                todo.append(value.op)
    return seen


def reached(trace: Trace, sources: set[int], span: tuple[int, int]) -> list[int]:
    """Return the operations within `span` that depend on some of these values."""
    numbers = set(sources)
    found = []
    for op in range(*span):
        if any(value.number in numbers for value in trace.ops[op].ins):
            found.append(op)
            numbers.update(value.number for value in trace.ops[op].outs)
    return found


def from_input(trace: Trace, *, draws: bool = False) -> bytearray:
    """Return for each value whether it depends on the model's arguments; with `draws`, or on random numbers."""
    marks = bytearray(len(trace.memory.values))
    for value in trace.memory.values:
        if value.origin == "argument":
            marks[value.number] = 1
    for op in trace.ops:
        if any(marks[value.number] for value in op.ins) or _foreign(op) or (draws and op.name in DRAWS):
            for value in op.outs:
                marks[value.number] = 1
    return marks


def _foreign(op: Op) -> bool:
    """Say whether an operation brings in numbers from outside torch."""
    return any(type(arg).__name__ == "ndarray" for arg in op.args)


def signature(arg: Any) -> Any:
    """Return the arguments of an operation that are not tensors, in a form that can be compared."""
    if isinstance(arg, Tensor):
        return "tensor"
    if isinstance(arg, tuple | list):
        return tuple([signature(inner) for inner in arg])
    if isinstance(arg, slice):
        return ("slice", signature(arg.start), signature(arg.stop), signature(arg.step))
    if arg is None or isinstance(arg, int | float | str | bool):
        return arg
    return type(arg).__name__


def where_of(windows: Windows) -> tuple[str, str]:
    """Return the module that a loop runs in, and its file and line."""
    owner = owner_of(windows.trace, windows.starts[0], windows.end)
    return (owner.path if owner is not None else "", line_of(windows.scope) if windows.scope is not None else "")


def owner_of(trace: Trace, start: int, end: int) -> ModuleCall | None:
    """Return the innermost module call that contains all of these operations."""
    number = trace.ops[start].call
    while number >= 0:
        call = trace.calls[number]
        if call.start <= start and (call.end >= end or call.end < 0):
            return call
        number = call.parent
    return None
