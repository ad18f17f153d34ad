"""Crossings: the values that cross from one turn of a loop to the next."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from .memory import Value
from .operation import Op
from .repetition import Windows, reaching, used_after


@dataclass(slots=True, eq=False, repr=False)
class Role:
    """A value that crosses in every turn: read at the same places, made at the same places."""

    values: list[Value | None]  # after each turn
    initial: Value | None
    members: set[int]  # numbers of all values that crossed
    readers: list[int]  # operations that read it across a boundary
    makers: list[int]  # operations that made it
    grows: bool = False  # more and more of them stay alive: a list that is read as a whole
    age: int = 0  # 0: made in the turn before; 1: in the one before that


class _Groups:
    """Disjoint sets of things that belong together (union-find)."""

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


_EARLY = 16  # the first turns, for which reads at their beginning are remembered


@dataclass(slots=True, eq=False, repr=False)
class _Crossings:
    """All reads, within a turn, of values that an earlier turn has made."""

    groups: _Groups = field(default_factory=_Groups)
    last: dict[int, int] = field(default_factory=dict)  # by value: the last turn that reads it
    readers: dict[int, list[int]] = field(default_factory=lambda: defaultdict(list))
    sites: dict[int, list[Any]] = field(default_factory=lambda: defaultdict(list))  # by value: the places that read it
    early: dict[Any, tuple[Value, Op]] = field(
        default_factory=dict
    )  # by site and turn: the value that is read, and the reader
    lags: dict[Any, int] = field(default_factory=dict)  # by site: how many turns ago the value read there was made
    unsteady: set[Any] = field(default_factory=set)  # sites where that changes


def roles_of(windows: Windows) -> list[Role]:
    """Return the values that cross from turn to turn, in the order in which they are read."""
    if windows.count < 2:
        return []
    found = _crossings(windows)
    values = windows.trace.memory.values
    grouped: dict[Any, list[int]] = defaultdict(list)
    for number in found.last:
        grouped[found.groups.find(("value", number))].append(number)
    roles: list[Role] = []
    for members in _alternating(windows, found, list(grouped.values())):
        roles += _roles(windows, found, sorted(members, key=lambda number: (values[number].op, number)))
    return sorted(roles, key=lambda role: (min(windows.place(op) for op in role.readers), role.age))


def complete(windows: Windows, roles: list[Role]) -> bool:
    """Say whether, of all that earlier turns made, each turn reads only what these roles hold at its beginning."""
    grown = {number for role in roles if role.grows for number in role.members}
    begin = windows.starts[0]
    for turn in range(1, windows.count):
        held = {value.number for role in roles if (value := role.values[turn - 1]) is not None}
        start = windows.starts[turn]
        for _, op in windows.of_turn(turn):
            for value in op.ins:
                if begin <= value.op < start and value.number not in held and value.number not in grown:
                    return False
    return True


def _alternating(windows: Windows, found: _Crossings, groups: list[list[int]]) -> list[list[int]]:
    """Join groups that alternate: a state that is read and made at other places in every other turn, or by chance."""
    values, count = windows.trace.memory.values, windows.count
    full: list[list[int]] = []
    partial: list[tuple[list[int], set[int]]] = []
    for members in groups:
        alive: set[int] = set()
        for number in members[: 4 * count]:
            alive.update(range(windows.turn(values[number].op) + 1, found.last[number] + 1))
        if len(alive) >= count - 1:
            full.append(members)
        else:
            partial.append((members, alive))
    if len(partial) > _PARTIAL:
        return groups
    while partial:
        members, alive = partial.pop(0)
        shape, dtype = values[members[0]].shape, values[members[0]].tensor.dtype
        for other in list(partial):
            like = values[other[0][0]].shape == shape and values[other[0][0]].tensor.dtype == dtype
            if like and not alive & other[1] and _same_thing(windows, members, other[0]):
                members, alive = members + other[0], alive | other[1]
                partial.remove(other)
        full.append(members)
    return full


def _same_thing(windows: Windows, one: list[int], other: list[int]) -> bool:
    """Say whether two groups are one variable: made at the same place, or held under the same name."""
    values = windows.trace.memory.values
    places = [{windows.place(values[number].op) for number in group[:8]} for group in (one, other)]
    if places[0] & places[1]:
        return True
    held = windows.trace.held.get(windows.scope, {}) if windows.scope is not None else {}
    tensors = [{id(values[number].tensor) for number in group} for group in (one, other)]
    names = [{now[t].name for now in held.values() for t in group if t in now} for group in tensors]
    return len(names[0]) == 1 and names[0] == names[1]


_PARTIAL = 64  # with more incomplete groups than this, none is joined


def _crossings(windows: Windows) -> _Crossings:
    found, begin = _Crossings(), windows.starts[0]
    varying, usual = _varying(windows)
    for turn in range(windows.count):
        start = windows.starts[turn]
        for number, op in windows.of_turn(turn):
            place = windows.place(number)
            for position, value in enumerate(op.ins):
                site = (place, -1 if place in varying else position)
                if turn < _EARLY and len(op.ins) == usual.get(place, len(op.ins)):
                    found.early.setdefault((site, turn), (value, op))
                if begin <= value.op < start:
                    found.groups.join(("value", value.number), site)
                    found.last[value.number] = turn
                    found.readers[value.number].append(number)
                    found.sites[value.number].append(site)
                    lag = turn - windows.turn(value.op) - 1
                    if found.lags.setdefault(site, lag) != lag:
                        found.unsteady.add(site)
                        found.lags[site] = lag
    return found


def _varying(windows: Windows) -> tuple[set[int], dict[int, int]]:
    """Return the places whose number of operands changes from turn to turn (growing lists), and the largest numbers.

    If there are other turns, the first one does not count: it may have no state to read yet.
    """
    counts: dict[int, int] = {}
    varying: set[int] = set()
    for turn in range(min(1, windows.count - 2), windows.count):
        for number, op in windows.of_turn(turn):
            place = windows.place(number)
            if counts.setdefault(place, len(op.ins)) != len(op.ins):
                varying.add(place)
            counts[place] = max(counts[place], len(op.ins))
    return varying, counts


def _roles(windows: Windows, found: _Crossings, members: list[int]) -> list[Role]:
    """Return the roles of values that belong together: a state, its last few values, or a growing list."""
    values, count = windows.trace.memory.values, windows.count
    alive: list[list[Value]] = [[] for _ in range(count)]  # by boundary between turns, newest last
    total = 0
    for number in members:
        made, last = windows.turn(values[number].op), found.last[number]
        total += last - made
        if total > 8 * count:  # every turn reads everything that earlier turns made
            return [_growing(windows, found, members)]
        for boundary in range(made + 1, last + 1):
            alive[boundary].append(values[number])
    depth = max(len(each) for each in alive)
    sites = {site for number in members for site in found.sites[number]}
    if not sites & found.unsteady and max(found.lags[site] for site in sites) < _EARLY:
        pass  # each reader always looks back equally far: a window, however short the loop
    elif depth > max(4, count // 2) or (depth > 2 and [len(each) for each in alive[1:]] == list(range(1, count))):
        return [_growing(windows, found, members)]
    makers = {windows.place(values[number].op): _slot(windows, values[number]) for number in members}
    if depth > 1:
        return _delays(windows, found, members, makers)
    return [_role(windows, found, members, alive, makers)]


def _delays(windows: Windows, found: _Crossings, members: list[int], makers: dict[int, int]) -> list[Role]:
    """Return a role for each earlier turn whose value is still read: h of one turn ago, of two turns ago, and so on."""
    made = _made_at(windows, makers)
    sites = dict.fromkeys(site for number in members for site in found.sites[number])
    deepest = max(found.lags[site] for site in sites)
    readers = [op for number in members for op in found.readers[number]]
    roles = []
    for age in range(deepest + 1):
        start = [_early(found, sites, age - turn - 1) for turn in range(-1, age)]
        values = [made.get(turn - age) if turn >= age else start[turn + 1] for turn in range(windows.count)]
        role = Role(values, start[0], set(members), readers, [v.op for v in values if v is not None], age=age)
        roles.append(role)
    return roles


def _early(found: _Crossings, sites: Iterable[Any], age: int) -> Value | None:
    """Return the value in place of one of this age, before the loop made any; the first turn that reads it shows it."""
    for site in sites:
        lag = found.lags[site]
        if lag >= age and (site, lag - age) in found.early:
            return found.early[site, lag - age][0]
    return None


def _growing(windows: Windows, found: _Crossings, members: list[int]) -> Role:
    """Return the role of a list: the values that the turns put into it."""
    values = windows.trace.memory.values
    readers = [op for number in members for op in found.readers[number]]
    made: list[Value | None] = [None] * windows.count
    for number in members:
        made[windows.turn(values[number].op)] = values[number]
    return Role(made, None, set(members), readers, [values[number].op for number in members], grows=True)


def _role(
    windows: Windows, found: _Crossings, members: list[int], alive: list[list[Value]], makers: dict[int, int]
) -> Role:
    """Return the role of a value of which exactly one is alive at each boundary between turns."""
    count = windows.count
    after: list[Value | None] = [alive[boundary][-1] if alive[boundary] else None for boundary in range(1, count)]
    made = _made_at(windows, makers)
    for turn in range(count - 1):
        if after[turn] is None:  # the next turn does not read it: take the value made at the same place
            after[turn] = made.get(turn) or (after[turn - 1] if turn else None)
    after.append(made.get(count - 1) or _left(windows, after))
    readers = [op for number in members for op in found.readers[number]]
    maker_ops = [value.op for value in after if value is not None]
    return Role(after, _initial(found, members), set(members), readers, maker_ops)


def _left(windows: Windows, after: list[Value | None]) -> Value | None:
    """Return the state after the last turn if that turn does not make it as the earlier ones do.

    It may leave the state unchanged, or stop early: a sampler adds no noise to its last sample. The state is found by
    the variable that holds it; else it is the value that is read after the loop, or read by nothing in it.
    """
    trace, last, before = windows.trace, windows.span(windows.count - 1), after[-1]
    if before is None or windows.turn(before.op) < 0:
        return before
    held = _held_in_the_end(windows, after)
    if held is not None and held.shape == before.shape and (held is before or last[0] <= held.op < last[1]):
        return held
    turn = windows.turn(before.op)
    way = {windows.place(op) for op in reaching(trace, [before], windows.span(turn))}
    shape, dtype = before.shape, before.tensor.dtype
    made = [v for number in range(*last) if windows.place(number) in way for v in trace.ops[number].outs]
    read = {value.number for number in range(*last) for value in trace.ops[number].ins}
    ends = [v for v in made if v.number not in read and v.shape == shape and v.tensor.dtype == dtype]
    if not ends:
        return before
    used = used_after(trace, (before.op, last[1]))
    handed = [value for value in (*ends, before) if value.number in used]
    return handed[0] if len(handed) == 1 else None  # None: it is unknown which of them it is


def _held_in_the_end(windows: Windows, after: list[Value | None]) -> Value | None:
    """Return the value, after the loop, of the variable that held the state at the beginning of the third turn."""
    trace, scope = windows.trace, windows.scope
    if scope is None or len(after) < 2 or after[1] is None:
        return None
    held = trace.held.get(scope, {}).get(2, {}).get(id(after[1].tensor))
    end = trace.ended.get(scope, {}).get(held.name) if held is not None and held.module is None else None
    return None if end is None else trace.peek(end)


def _initial(found: _Crossings, members: list[int]) -> Value | None:
    """Return the value that the first turn reads where later turns read the crossing value, at most of these places."""
    sites = Counter(site for number in members for site in found.sites[number])
    for site, _ in sites.most_common():
        if (site, 0) in found.early:
            value, op = found.early[site, 0]
            later = found.early.get((site, 1))
            shape = later[0].shape if later is not None else value.shape
            # If later turns read a written part of a tensor, the first turn reads the part itself.
            parts = [made for made in op.outs if made.shape == shape and made.store is value.store]
            return parts[0] if value.shape != shape and parts and value.store is not None else value
    return None


def _slot(windows: Windows, value: Value) -> int:
    """Return the index of a value among the results of its operation."""
    return next(slot for slot, made in enumerate(windows.trace.ops[value.op].outs) if made is value)


def _made_at(windows: Windows, makers: dict[int, int]) -> dict[int, Value]:
    """Return, for each turn, the last value made at one of these places; each place comes with an index of results."""
    found: dict[int, Value] = {}
    for turn in range(windows.count):
        for number, op in windows.of_turn(turn):
            slot = makers.get(windows.place(number))
            if slot is not None and slot < len(op.outs):
                found[turn] = op.outs[slot]
    return found
