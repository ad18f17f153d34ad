"""Chains: calls of a module that are given the module's earlier results."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from .memory import Value
from .operation import BLENDS, MOVES, ModuleCall
from .trace import Trace

_STEPS_BACK = 96  # values to go back from an argument


@dataclass(slots=True, eq=False, repr=False)
class Link:
    """An argument of one call that is a result of an earlier one, or was made from it."""

    earlier: int  # index of the earlier call of the same module
    result: tuple[Any, ...]
    path: set[int]  # the values in between
    blended: bool


@dataclass(slots=True, eq=False, repr=False)
class Chain:
    """Calls of one module, each given the result of the one before."""

    module: nn.Module
    path: str
    calls: list[ModuleCall]
    parts: dict[tuple[Any, ...], list[Link]]  # by argument: one link for each call after the first
    known: bool
    on_the_way: set[int] = field(default_factory=set)  # all values that carry the state

    def values(self, argument: tuple[Any, ...]) -> list[Value | None]:
        """Return what crosses after each call, None if nothing does; after the last call, what it returned."""
        after = [_argument(call, argument) for call in self.calls[1:]]
        return [*after, dict(self.calls[-1].results)[self.parts[argument][-1].result]]

    def initial(self, argument: tuple[Any, ...]) -> Value | None:
        """Return what the first call was given."""
        return _argument(self.calls[0], argument)


def chains_of(trace: Trace) -> list[Chain]:
    """Return all chains of two or more calls, in the order in which they begin."""
    by_module: dict[nn.Module, list[ModuleCall]] = defaultdict(list)
    for call in trace.calls:
        if call.end > call.start and call.args and call.results:
            by_module[call.module].append(call)
    found: list[Chain] = []
    for calls in by_module.values():
        chains = _chains(trace, calls) if len(calls) > 1 else []
        found += chains if len(chains) < 2 or not _dilated(trace, chains) else []
    return sorted(found, key=lambda chain: chain.calls[0].start)


def _dilated(trace: Trace, chains: list[Chain]) -> bool:
    """Say whether chains belong together, each call continuing from several turns ago: a window in a loop."""
    first, last = min(c.calls[0].start for c in chains), max(c.calls[-1].end for c in chains)
    calls = [call for chain in chains for call in chain.calls]
    for loop in trace.places.scopes:
        if loop.kind == "loop" and loop.start <= first and last <= loop.end and len(loop.turns) >= len(calls):
            turns = [turn.start for turn in loop.turns]
            if len({bisect_right(turns, call.start) for call in calls}) == len(calls):
                return True
    return False


def _argument(call: ModuleCall, place: tuple[Any, ...]) -> Value | None:
    return next((value for where, value in call.args if where == place), None)


def _chains(trace: Trace, calls: list[ModuleCall]) -> list[Chain]:
    given: dict[int, list[tuple[int, tuple[Any, ...]]]] = defaultdict(list)
    links: list[dict[tuple[Any, ...], Link]] = []
    for number, call in enumerate(calls):
        links.append(_links(trace, calls, number, given) if number else {})
        for place, value in call.results:
            given[value.number].append((number, place))
    often = Counter(place for found in links for place in found)
    if not often:
        return []
    # A cell that is used for several layers is given the layer below's result and its own from the step before. The
    # argument that most calls take from an earlier call is the state.
    lead = max(often, key=lambda place: (often[place], len(place), str(place)))
    following: dict[int, tuple[int, dict[tuple[Any, ...], Link]]] = {}
    for number, found in enumerate(links):
        if lead in found:
            earlier = found[lead].earlier
            kept = {place: link for place, link in found.items() if link.earlier == earlier}
            following.setdefault(earlier, (number, kept))
    return _joined(calls, following)


def _joined(calls: list[ModuleCall], following: dict[int, tuple[int, dict[tuple[Any, ...], Link]]]) -> list[Chain]:
    chains = []
    later = {number for number, _ in following.values()}
    for start in range(len(calls)):
        if start in later or start not in following:
            continue
        numbers, links = [start], []
        while numbers[-1] in following:
            number, found = following[numbers[-1]]
            numbers.append(number)
            links.append(found)
        places = [place for place in links[0] if all(place in found for found in links)]
        late = [place for place in links[-1] if len(links) > 2 and all(place in found for found in links[1:])]
        # The first link may differ from later ones: the second call may make a start of its own.
        parts = {place: [found[place] for found in links if place in found] for place in dict.fromkeys(places + late)}
        if not parts:
            continue
        first = calls[start]
        chain = Chain(first.module, first.path, [calls[n] for n in numbers], parts, first.known)
        for found in links:
            chain.on_the_way.update(*(link.path for place, link in found.items() if place in parts))
        chains.append(chain)
    return chains


def _links(
    trace: Trace, calls: list[ModuleCall], number: int, given: dict[int, list[tuple[int, tuple[Any, ...]]]]
) -> dict[tuple[Any, ...], Link]:
    found: dict[tuple[Any, ...], Link] = {}
    for place, value in calls[number].args:
        link = _link(trace, value, given, calls)
        if link is not None:
            found[place] = link
    return found


def _link(
    trace: Trace, value: Value, given: dict[int, list[tuple[int, tuple[Any, ...]]]], calls: list[ModuleCall]
) -> Link | None:
    """Go back from an argument through operations that only move or mask numbers, to an earlier call's result."""
    begin = calls[0].start
    came: dict[int, int] = {value.number: -1}
    todo, values = [value], trace.memory.values
    hits: list[tuple[int, Value]] = []
    for one in todo:
        if one.number in given:
            hits.append((max(earlier for earlier, _ in given[one.number]), one))
            continue
        if one.op < begin or len(came) > _STEPS_BACK:
            continue
        op = trace.ops[one.op]
        if op.name not in MOVES and op.name not in BLENDS:
            continue
        for source in op.ins:
            if source.number not in came:
                came[source.number] = one.number
                todo.append(source)
    for earlier, hit in sorted(hits, key=lambda each: -each[0]):
        path, step = set(), hit.number
        while step != -1:
            path.add(step)
            step = came[step]
        plain = all(trace.ops[values[n].op].name in _AS_IT_IS for n in path if n != hit.number)
        blended = not plain and not _same(value, hit)
        if blended and not _mixed(value, hit, (calls[earlier], calls[0])):
            continue
        places = [place for number, place in given[hit.number] if number == earlier]
        if blended:  # all values that a mask mixes belong to the path
            path |= {number for number in came if values[number].op >= begin}
        return Link(earlier, max(places, key=len), path, blended)
    return None


_AS_IT_IS = {"detach", "clone", "contiguous", "alias", "copy_", "view_as", "requires_grad_", "detach_"}


def _same(value: Value, given: Value) -> bool:
    one, other = value.data(), given.data()
    if one is None or other is None:
        return False
    if one.numel() != other.numel():
        return one.dim() >= other.dim() and _expanded(one, other)
    return _equal(one.reshape(other.shape), other)


def _expanded(one: Tensor, other: Tensor) -> bool:
    try:
        return _equal(one, other.broadcast_to(one.shape))
    except RuntimeError:
        return False


def _equal(one: Tensor, other: Tensor) -> bool:
    if not one.is_floating_point() or not other.is_floating_point():
        return bool(torch.equal(one, other))
    return bool(torch.equal(one.to(other.dtype), other)) or bool(torch.allclose(one.to(other.dtype), other, 1e-6, 1e-7))


def _mixed(value: Value, given: Value, calls: tuple[ModuleCall, ModuleCall]) -> bool:
    """Say whether each number comes from the call's result, its argument or its start, or is zero, as masks do."""
    one, other = value.data(), given.data()
    if one is None or other is None or one.shape != other.shape:
        return False
    fits = _close(one, other) | (one == 0)
    for call in calls:
        for _, argument in call.args:
            before = argument.data()
            if before is not None and before.shape[-1:] == one.shape[-1:] and before.dim() <= one.dim():
                try:
                    fits |= _close(one, before.broadcast_to(one.shape))
                except RuntimeError:
                    continue  # of another size, so a mask cannot mix it in
    return bool(fits.all())


def _close(one: Tensor, other: Tensor) -> Tensor:
    # Masking by multiplication may round: m * new + (1 - m) * old.
    if one.is_floating_point() and other.is_floating_point():
        return torch.isclose(one, other.to(one.dtype), 1e-5, 1e-7)
    return one == other
