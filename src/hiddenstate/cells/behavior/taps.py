"""Seeing a loop's states in later calls without tracing all of them: where they are made is known by then.

A place in the code is the instruction that makes a value, and those that lead there through torch's own code. What a
call does between two such places is known too, operation by operation: a call that does anything else is not read.
"""

from __future__ import annotations

import sys
import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby, pairwise
from types import CodeType, FrameType
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from ..unheard import watching
from .candidates import Candidate
from .memory import Value
from .operands import leaves
from .places import Scope, in_torch, is_between
from .trace import Trace

Site: TypeAlias = tuple[Any, tuple[tuple[CodeType, int], ...], int]  # function, instructions, which of its results
Seen: TypeAlias = tuple[int, int]  # which function and instructions, and what was done since the one before


class Taps(TorchFunctionMode):
    """Keeps what is made at known places, and what was done between them."""

    def __init__(self, sites: Iterable[Site]) -> None:
        """Listen at these places."""
        super().__init__()
        self.ours = False
        self.seen: list[Seen] = []
        self.made: dict[Site, list[Tensor]] = defaultdict(list)
        self.since = 0  # what was done since the last of them
        self._at: dict[Any, dict[Any, int]] = defaultdict(dict)
        for number, (function, chain, _) in enumerate(sites):
            self._at[function].setdefault(chain, number)
        self._thread = threading.get_ident()

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run one operation."""
        result = func(*args, **(kwargs or {}))
        made = isinstance(result, Tensor | tuple | list) and not isinstance(result, torch.Size)
        if self.ours or not made or threading.get_ident() != self._thread:
            return result
        self.since = hash((self.since, func))
        chains = self._at.get(func)
        if chains is not None:
            chain = _chain(sys._getframe(1))
            if chain in chains:
                self.seen.append((chains[chain], self.since))
                self.since = 0
                found = [result] if isinstance(result, Tensor) else [tensor for _, tensor in leaves(result)]
                for place, tensor in enumerate(found):
                    self.made[func, chain, place].append(tensor)
        return result

    def around(self, run: Callable[[], Any]) -> Any:
        """Return what `run()` does, heard from beginning to end."""
        with watching(self), self:
            return run()

    def place(self, site: Site) -> int:
        """Return the number by which `seen` names a place."""
        return self._at[site[0]][site[1]]


@dataclass(frozen=True, slots=True)
class _Start:
    """Where an initial value is from: made at a place, an argument, or a tensor that is always the same one."""

    site: Site | None = None
    argument: tuple[Any, ...] = ()
    tensor: Tensor | None = field(default=None, compare=False)
    number: int = field(default=0, compare=False)  # which of those made there, after all turns so far


@dataclass(frozen=True, slots=True)
class Tapped:
    """Where one part of a recurrence is made, and what it starts from."""

    module: str
    line: str
    name: str
    site: Site
    start: _Start | None


@dataclass(frozen=True, slots=True, eq=False)
class _Run:
    """A loop: what is done until its first turn has ended, and in every turn after that."""

    head: tuple[Seen, ...]
    body: tuple[Seen, ...]
    parts: tuple[Tapped, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Plan:
    """Where the loops of a model make their states: found in one call, proven by a second one."""

    loops: tuple[tuple[Tapped, ...], ...]
    runs: tuple[_Run, ...] = ()  # once it is proven
    rest: int = 0  # what is done after the last turn

    @property
    def sites(self) -> list[Site]:
        """All places."""
        parts = [part for loop in self.loops for part in loop]
        return list(dict.fromkeys([p.site for p in parts] + [p.start.site for p in parts if p.start and p.start.site]))

    def read(self, taps: Taps, inputs: Any) -> list[tuple[Tapped, list[Tensor], Tensor | None]] | None:
        """Return each part, what it was after each turn, and before; None where the call did anything else."""
        position, taken, found = 0, Counter[Site](), []
        for run in self.runs:
            if tuple(taps.seen[position : position + len(run.head)]) != run.head:
                return None
            position, turns = position + len(run.head), 1
            while tuple(taps.seen[position : position + len(run.body)]) == run.body:
                position, turns = position + len(run.body), turns + 1
            for part in run.parts:
                values = taps.made[part.site][taken[part.site] : taken[part.site] + turns]
                found.append((part, values, _start(part.start, taps, taken, inputs)))
            taken.update({site: turns for site in {part.site for part in run.parts}})
        return found if position == len(taps.seen) and taps.since == self.rest else None

    def proven(self, other: Plan | None, taps: Taps, candidates: Sequence[Candidate]) -> Plan | None:
        """Return the plan with what is done between its places, where a second call has the same one and shows it."""
        if other is None or other.loops != self.loops:
            return None
        places: dict[int, list[int]] = defaultdict(list)
        for number, (place, _) in enumerate(taps.seen):
            places[place].append(number)
        runs, taken, end = [], Counter[Site](), 0
        for parts, group in zip(self.loops, _loops(candidates), strict=True):
            drafts = [draft for candidate in group for draft in candidate.drafts]
            values = [draft.values for draft in drafts]
            own = tuple(_numbered(part, draft.initial, taps, taken) for part, draft in zip(parts, drafts, strict=True))
            turns = group[0].windows.count
            ends = []
            for turn in range(turns):
                for part, each in zip(parts, values, strict=True):
                    made, number, value = taps.made[part.site], taken[part.site] + turn, each[turn]
                    if number >= len(made) or value is None or made[number] is not value.tensor:
                        return None
                ends.append(1 + max(places[taps.place(part.site)][taken[part.site] + turn] for part in parts))
            taken.update({site: turns for site in {part.site for part in parts}})
            bodies = {tuple(taps.seen[one:two]) for one, two in pairwise(ends)}
            if len(bodies) != 1:
                return None
            runs.append(_Run(tuple(taps.seen[end : ends[0]]), bodies.pop(), own))
            end = ends[-1]
        if end != len(taps.seen):
            return None
        return replace(self, runs=tuple(runs), rest=taps.since)


def _numbered(part: Tapped, value: Value | None, taps: Taps, taken: Mapping[Site, int]) -> Tapped:
    """Say which of the values that are made at its place a part starts from."""
    if part.start is None or part.start.site is None or value is None:
        return part
    site = part.start.site
    found = [number for number, made in enumerate(taps.made[site]) if made is value.tensor]
    return replace(part, start=replace(part.start, number=found[0] - taken[site]) if found else None)


def _start(start: _Start | None, taps: Taps, taken: Mapping[Site, int], inputs: Any) -> Tensor | None:
    if start is None or start.tensor is not None:
        return None if start is None else start.tensor
    if start.site is not None:
        made, number = taps.made[start.site], taken[start.site] + start.number
        return made[number] if number < len(made) else None
    return next((tensor for place, tensor in leaves(inputs) if place == start.argument), None)


def plan_of(trace: Trace, candidates: Sequence[Candidate], inputs: Any) -> Plan | None:
    """Return where the loops of a call make their states; None where one of them is not made at one place each turn."""
    arguments = {id(tensor): place for place, tensor in leaves(inputs)}
    loops = []
    for group in _loops(candidates):
        parts = []
        for candidate in group:
            for draft in candidate.drafts:
                sites = {_site(trace, value) for value in draft.values}
                start = _start_of(trace, draft.initial, arguments)
                if len(sites) != 1 or None in sites or (start is None and draft.initial is not None):
                    return None
                (site,) = sites
                parts.append(Tapped(candidate.module, candidate.line, draft.name, site, start))  # type: ignore[arg-type]
        loops.append(tuple(parts))
    return Plan(tuple(loops)) if loops else None


def _loops(candidates: Sequence[Candidate]) -> list[list[Candidate]]:
    """Return what only a trace shows, by the loop that it is in."""
    found = [each for each in candidates if each.kind not in ("cell", "cache") and each.windows.count > 2]
    found.sort(key=lambda each: each.windows.starts[0])
    return [list(group) for _, group in groupby(found, key=lambda each: id(each.windows.scope or each))]


def _start_of(trace: Trace, value: Value | None, arguments: Mapping[int, tuple[Any, ...]]) -> _Start | None:
    if value is None:
        return None
    if value.op >= 0:
        site = _site(trace, value)
        return None if site is None else _Start(site)
    if value.origin == "argument" and id(value.tensor) in arguments:
        return _Start(argument=arguments[id(value.tensor)])
    return _Start(tensor=value.tensor) if value.origin == "parameter" else None


def _site(trace: Trace, value: Value | None) -> Site | None:
    """Return where a value was made; None where it was written, or is not what an operation gave."""
    if value is None or value.op < 0 or value.copy is not None or (value.store is not None and value.store.writes):
        return None
    op = trace.ops[value.op]
    chain, scope, offset = [], op.scope, op.offset
    while True:
        call = _call(scope)
        chain.append((call.code, offset))
        if not in_torch(call.code) or call.parent is None:
            return op.func, tuple(chain), value.place
        scope, offset = call.parent, call.key


def _call(scope: Scope) -> Scope:
    while scope.kind != "call" and scope.parent is not None:
        scope = scope.parent
    return scope


def _chain(frame: FrameType | None) -> tuple[tuple[CodeType, int], ...]:
    chain = []
    while frame is not None:
        code = frame.f_code
        if not is_between(code):
            chain.append((code, frame.f_lasti))
            if not in_torch(code):
                break
        frame = frame.f_back
    return tuple(chain)
