"""What crosses from one turn of a loop to the next."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from torch import Tensor

from .memory import Value
from .places import Scope
from .trace import Op, Trace


@dataclass(slots=True, eq=False)
class Role:
    """A value that crosses, turn after turn: read at the same places, made at the same places."""

    values: list[Value | None]  # after each turn
    initial: Value | None
    members: set[int]  # numbers of all values that crossed
    readers: list[int]  # operations that read it across a boundary
    makers: list[int]  # operations that made it
    grows: bool = False  # more and more of them are alive: a list that is read again as a whole
    age: int = 0  # 0: made in the turn before; 1: in the one before that


@dataclass(eq=False)
class Windows:
    """A stretch of the trace, cut into repetitions."""

    trace: Trace
    starts: list[int]
    end: int
    scope: Scope | None = None

    @property
    def count(self) -> int:
        """The number of repetitions."""
        return len(self.starts)

    def span(self, turn: int) -> tuple[int, int]:
        """Return the operations of one repetition, from and to."""
        return self.starts[turn], self.starts[turn + 1] if turn + 1 < self.count else self.end

    def turn(self, op: int) -> int:
        """Return the repetition that an operation belongs to; -1 before the first."""
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
    """Return the turns of a loop as repetitions."""
    return Windows(trace, [turn.start for turn in loop.turns], loop.end, loop)


class _Groups:
    """Things that belong together (union and find)."""

    def __init__(self) -> None:
        self._above: dict[Any, Any] = {}

    def find(self, one: Any) -> Any:
        above = self._above.setdefault(one, one)
        while above != self._above[above]:
            self._above[above] = self._above[self._above[above]]
            above = self._above[above]
        return above

    def join(self, one: Any, other: Any) -> None:
        self._above[self.find(one)] = self.find(other)

    def known(self) -> list[Any]:
        return list(self._above)


@dataclass(slots=True, eq=False)
class _Crossings:
    groups: _Groups = field(default_factory=_Groups)
    last: dict[int, int] = field(default_factory=dict)  # by value: the last turn that reads it
    readers: dict[int, list[int]] = field(default_factory=lambda: defaultdict(list))
    sites: dict[int, list[Any]] = field(default_factory=lambda: defaultdict(list))  # by value: where it is read
    first: dict[Any, tuple[Value, Op]] = field(default_factory=dict)  # by site: what the first turn reads there, and by what


def roles_of(windows: Windows) -> list[Role]:
    """Return what crosses from turn to turn, in the order in which it is read."""
    if windows.count < 2:
        return []
    found = _crossings(windows)
    values = windows.trace.memory.values
    grouped: dict[Any, list[int]] = defaultdict(list)
    for number in found.last:
        grouped[found.groups.find(("value", number))].append(number)
    roles: list[Role] = []
    for members in grouped.values():
        roles += _roles(windows, found, sorted(members, key=lambda number: (values[number].op, number)))
    return sorted(roles, key=lambda role: (min(windows.place(op) for op in role.readers), role.age))


def _crossings(windows: Windows) -> _Crossings:
    found, begin = _Crossings(), windows.starts[0]
    varying = _varying(windows)
    for turn in range(windows.count):
        start = windows.starts[turn]
        for number, op in windows.of_turn(turn):
            place = windows.place(number)
            for position, value in enumerate(op.ins):
                site = (place, -1 if place in varying else position)
                if turn == 0:
                    found.first.setdefault(site, (value, op))
                elif begin <= value.op < start:
                    found.groups.join(("value", value.number), site)
                    found.last[value.number] = turn
                    found.readers[value.number].append(number)
                    found.sites[value.number].append(site)
    return found


def _varying(windows: Windows) -> set[int]:
    """Return the places where the number of operands changes from turn to turn: lists that grow."""
    counts: dict[int, int] = {}
    varying: set[int] = set()
    for turn in range(windows.count):
        for number, op in windows.of_turn(turn):
            place = windows.place(number)
            if counts.setdefault(place, len(op.ins)) != len(op.ins):
                varying.add(place)
    return varying


def _roles(windows: Windows, found: _Crossings, members: list[int]) -> list[Role]:
    values, count = windows.trace.memory.values, windows.count
    alive: list[list[Value]] = [[] for _ in range(count)]  # by boundary, newest last
    total = 0
    for number in members:
        made, last = windows.turn(values[number].op), found.last[number]
        total += last - made
        if total > 8 * count:  # every turn reads what all turns before it made
            return [_growing(windows, found, members)]
        for boundary in range(made + 1, last + 1):
            alive[boundary].append(values[number])
    depth = max(len(each) for each in alive)
    if depth > max(4, count // 2) or (depth > 2 and [len(each) for each in alive[1:]] == list(range(1, count))):
        return [_growing(windows, found, members)]
    makers = {windows.place(values[number].op): _slot(windows, values[number]) for number in members}
    roles = [_role(windows, found, (members, alive, makers), age) for age in range(depth)]
    for role in roles[1:]:  # in the first turns, what is older was there before the loop
        for turn in range(role.age):
            if role.values[turn] is None:
                role.values[turn] = roles[role.age - 1 - turn].initial
    return roles


def _growing(windows: Windows, found: _Crossings, members: list[int]) -> Role:
    values = windows.trace.memory.values
    readers = [op for number in members for op in found.readers[number]]
    made: list[Value | None] = [None] * windows.count
    for number in members:
        made[windows.turn(values[number].op)] = values[number]
    return Role(made, None, set(members), readers, [values[number].op for number in members], grows=True)


def _role(windows: Windows, found: _Crossings, group: tuple[list[int], list[list[Value]], dict[int, int]], age: int) -> Role:
    members, alive, makers = group
    count = windows.count
    after: list[Value | None] = []
    for boundary in range(1, count):
        here = sorted(alive[boundary], key=lambda value: value.op)
        after.append(here[-1 - age] if len(here) > age else None)
    made = _made_at(windows, makers) if age == 0 or None in after else {}
    for turn in range(count - 1):
        if after[turn] is None and age == 0:
            after[turn] = made.get(turn) or (after[turn - 1] if turn else None)
    if age == 0:
        after.append(made.get(count - 1) or (after[-1] if after else None))
    else:
        newer = sorted(alive[count - 1], key=lambda value: value.op)
        after.append(newer[-age] if len(newer) >= age else None)
    mine = {value.number for value in after if value is not None} & set(members) or set(members)
    initial = _initial(found, mine, alive, age)
    readers = [op for number in mine for op in found.readers.get(number, ())]
    maker_ops = [value.op for value in after if value is not None]
    return Role(after, initial, set(members), readers or [windows.starts[0]], maker_ops, age=age)


def _initial(found: _Crossings, mine: set[int], alive: list[list[Value]], age: int) -> Value | None:
    """Return what the first turn reads where later ones read what crossed, at the most usual of these places."""
    sites: Counter[Any] = Counter()
    for here in alive[1:]:
        ordered = sorted(here, key=lambda value: value.op)
        if len(ordered) > age and ordered[-1 - age].number in mine:
            sites.update(found.sites[ordered[-1 - age].number])
    shape = next((value.shape for here in alive[1:] for value in here if value.number in mine), None)
    for site, _ in sites.most_common():
        if site in found.first:
            value, op = found.first[site]
            # Where later turns read what was written to a part of a tensor, the first one reads the part itself.
            parts = [made for made in op.outs if made.shape == shape and made.store is value.store]
            return parts[0] if value.shape != shape and parts and value.store is not None else value
    return None


def _slot(windows: Windows, value: Value) -> int:
    return next(slot for slot, made in enumerate(windows.trace.ops[value.op].outs) if made is value)


def _made_at(windows: Windows, makers: dict[int, int]) -> dict[int, Value]:
    """Return, for each turn, the last value made at one of these places, which come with the result that is meant."""
    found: dict[int, Value] = {}
    for turn in range(windows.count):
        for number, op in windows.of_turn(turn):
            slot = makers.get(windows.place(number))
            if slot is not None and slot < len(op.outs):
                found[turn] = op.outs[slot]
    return found


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


def from_input(trace: Trace) -> bytearray:
    """Say for each value whether it depends on what the model was called with."""
    marks = bytearray(len(trace.memory.values))
    for value in trace.memory.values:
        if value.origin == "argument":
            marks[value.number] = 1
    for op in trace.ops:
        if any(marks[value.number] for value in op.ins) or _foreign(op):
            for value in op.outs:
                marks[value.number] = 1
    return marks


def _foreign(op: Op) -> bool:
    """Say whether an operation brings in numbers from outside torch."""
    return any(type(arg).__name__ == "ndarray" for arg in op.args)


def signature(arg: Any) -> Any:
    """Return the part of an operation's arguments that is not tensors, as something that can be compared."""
    if isinstance(arg, Tensor):
        return "tensor"
    if isinstance(arg, tuple | list):
        return tuple([signature(inner) for inner in arg])
    if isinstance(arg, slice):
        return ("slice", signature(arg.start), signature(arg.stop), signature(arg.step))
    if arg is None or isinstance(arg, int | float | str | bool):
        return arg
    return type(arg).__name__
