"""Observing a loop's states in later calls without a full trace, at the places that are known to make them.

A place in the code is the instruction that makes a value, with those that lead to it through torch's own code. The
operations between two such places are known too: if a call does anything else there, it is not read.
"""

from __future__ import annotations

import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import groupby, pairwise
from threading import get_ident
from types import CodeType, FrameType
from typing import Any, Protocol, TypeAlias

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ..listener import Heeds, Rank, around, watching
from ..signature import Arguments
from .candidates import Candidate
from .memory import Value
from .operation import OVERWRITES, Op, leaves
from .places import Scope, in_torch, is_between
from .trace import Trace

Chain: TypeAlias = tuple[
    tuple[CodeType, int], ...
]  # an instruction, and those that lead to it through torch's own code
Site: TypeAlias = tuple[Any, Chain, int]  # function, instructions, index of the result
Seen: TypeAlias = tuple[int, int]  # function and instructions by number, and a hash of what was done since the last one


class Instead(Protocol):
    """Replaces arguments and results of operations by other tensors."""

    ours: bool
    offsets: Mapping[Any, Set[int]]  # by function: the offsets of those of its calls that matter

    def handed(self, func: Any, args: Any, kwargs: Any, frame: FrameType) -> tuple[Any, Any]:
        """Return the arguments for an operation."""

    def made(self, func: Any, result: Any, frame: FrameType) -> Any:
        """Return the result of an operation."""


_MADE = (Tensor, tuple, list)


class LoopTaps(TorchFunctionMode):
    """Keeps the values made at known places, and what was done between them."""

    def __init__(self, sites: Iterable[Site], known: Iterable[nn.Module] = ()) -> None:
        """Observe these places; operations inside modules `known` by type are skipped."""
        super().__init__()
        self.ours = False
        self._known, self._inside = list(known), 0
        self.overriding: Instead | None = None  # replaces tensors, if somebody wants that
        self.way: Heeds | None = None
        self.seen: list[Seen] = []
        self.made: dict[Site, list[Tensor]] = defaultdict(list)
        self.since = 0  # a hash of what was done since the last known place
        self._at: dict[Any, dict[Any, int]] = defaultdict(dict)
        for number, (function, chain, _) in enumerate(sites):
            self._at[function].setdefault(chain, number)
        self._offsets = {function: offsets_of(chains) for function, chains in self._at.items()}
        self._thread = get_ident()

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run one operation."""
        over, way, frame = self.overriding, self.way, sys._getframe(1)
        if over is None or over.ours or not may_be_at(frame, over.offsets.get(func)):
            result = func(*args, **kwargs) if kwargs else func(*args)
        else:
            own, named = over.handed(func, args, kwargs or {}, frame)
            result = over.made(func, func(*own, **named), frame)
        if way is not None and not way.ours:
            way.heed(func, args, kwargs, result, frame)
        # Every operation of a model passes here: the cheapest test that excludes most of them comes first.
        if type(result) is not Tensor and (not isinstance(result, _MADE) or isinstance(result, torch.Size)):
            return result
        if self.ours or self._inside or get_ident() != self._thread:
            return result
        self.since = hash((self.since, func))
        if may_be_at(frame, self._offsets.get(func)):
            self._note(func, chain_of(frame), result)
        return result

    def _note(self, func: Any, chain: Chain, result: Any) -> None:
        """Keep the result if this is one of the places."""
        if chain in self._at[func]:
            self.seen.append((self._at[func][chain], self.since))
            self.since = 0
            found = [result] if isinstance(result, Tensor) else [tensor for _, tensor in leaves(result)]
            for place, tensor in enumerate(found):
                self.made[func, chain, place].append(tensor)

    def around(self, run: Callable[[], Any]) -> Any:
        """Return the result of `run()`, observed from beginning to end."""
        handles = [around(module, partial(self._known_call, module), rank=Rank.ACCELERATE) for module in self._known]
        try:
            with watching(self), self:
                return run()
        finally:
            for handle in handles:
                handle.remove()

    def _known_call(self, module: nn.Module, arguments: Arguments, run: Callable[[Arguments], Any]) -> Any:
        """Run a known module; whether it is given a state or makes one is not another way through the model."""
        if get_ident() != self._thread:
            return run(arguments)
        self._inside += 1
        try:
            result = run(arguments)
        finally:
            self._inside -= 1
        self.since = hash((self.since, module))
        if module in self._at:
            self._note(module, chain_of(sys._getframe(1))[-1:], result)
        return result

    def place(self, site: Site) -> int:
        """Return the number of a place in `seen`."""
        return self._at[site[0]][site[1]]


@dataclass(frozen=True, slots=True)
class _TappedStart:
    """The origin of an initial value: a place that makes it, an argument, or a tensor that is always the same."""

    site: Site | None = None
    argument: tuple[Any, ...] = ()
    tensor: Tensor | None = field(default=None, compare=False)
    number: int = field(default=0, compare=False)  # its number among the values made there, after all turns so far


@dataclass(frozen=True, slots=True)
class Tapped:
    """The place that makes one part of a recurrence, and the part's start."""

    module: str
    line: str
    name: str
    site: Site
    start: _TappedStart | None


@dataclass(frozen=True, slots=True, eq=False)
class _TappedLoop:
    """A loop: what is done until the end of its first turn, and in every later turn."""

    head: tuple[Seen, ...]
    body: tuple[Seen, ...]
    parts: tuple[Tapped, ...]


@dataclass(frozen=True, slots=True, eq=False)
class TapPlan:
    """The places where the loops of a model make their states: found in one call, confirmed by a second one."""

    loops: tuple[tuple[Tapped, ...], ...]
    runs: tuple[_TappedLoop, ...] = ()  # set once it is confirmed
    rest: int = 0  # what is done after the last turn

    @property
    def sites(self) -> list[Site]:
        """All places."""
        parts = [part for loop in self.loops for part in loop]
        return list(dict.fromkeys([p.site for p in parts] + [p.start.site for p in parts if p.start and p.start.site]))

    def read(self, taps: LoopTaps, inputs: Any) -> list[tuple[Tapped, list[Tensor], Tensor | None]] | None:
        """Return each part with its values after each turn, and before; None if the call did anything else."""
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

    def proven(self, other: TapPlan | None, taps: LoopTaps, candidates: Sequence[Candidate]) -> TapPlan | None:
        """Return the plan with what is done between its places, if a second call has the same plan and confirms it."""
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
            runs.append(_TappedLoop(tuple(taps.seen[end : ends[0]]), bodies.pop(), own))
            end = ends[-1]
        if end != len(taps.seen):
            return None
        return replace(self, runs=tuple(runs), rest=taps.since)


def _numbered(part: Tapped, value: Value | None, taps: LoopTaps, taken: Mapping[Site, int]) -> Tapped:
    """Find the number of the value that a part starts from, among those made at its place."""
    if part.start is None or part.start.site is None or value is None:
        return part
    site = part.start.site
    found = [number for number, made in enumerate(taps.made[site]) if made is value.tensor]
    return replace(part, start=replace(part.start, number=found[0] - taken[site]) if found else None)


def _start(start: _TappedStart | None, taps: LoopTaps, taken: Mapping[Site, int], inputs: Any) -> Tensor | None:
    if start is None or start.tensor is not None:
        return None if start is None else start.tensor
    if start.site is not None:
        made, number = taps.made[start.site], taken[start.site] + start.number
        return made[number] if number < len(made) else None
    return next((tensor for place, tensor in leaves(inputs) if place == start.argument), None)


def plan_of(trace: Trace, candidates: Sequence[Candidate], inputs: Any) -> TapPlan | None:
    """Return where the loops of a call make their states; None if one of them is not made at one place in each turn."""
    arguments = {id(tensor): place for place, tensor in leaves(inputs)}
    loops = []
    for group in _loops(candidates):
        parts = []
        for candidate in group:
            for draft in candidate.drafts:
                sites = {site_of(trace, value) for value in draft.values}
                start = _start_of(trace, draft.initial, arguments)
                if len(sites) != 1 or None in sites or (start is None and draft.initial is not None):
                    return None
                (site,) = sites
                parts.append(Tapped(candidate.module, candidate.line, draft.name, site, start))  # type: ignore[arg-type]
        loops.append(tuple(parts))
    return TapPlan(tuple(loops)) if loops else None


def _loops(candidates: Sequence[Candidate]) -> list[list[Candidate]]:
    """Group the candidates that only a trace shows by their loops."""
    found = [each for each in candidates if each.kind not in ("cell", "cache") and each.windows.count > 2]
    found.sort(key=lambda each: each.windows.starts[0])
    return [list(group) for _, group in groupby(found, key=lambda each: id(each.windows.scope or each))]


def _start_of(trace: Trace, value: Value | None, arguments: Mapping[int, tuple[Any, ...]]) -> _TappedStart | None:
    if value is None:
        return None
    if value.op >= 0:
        site = site_of(trace, value)
        return None if site is None else _TappedStart(site)
    if value.origin == "argument" and id(value.tensor) in arguments:
        return _TappedStart(argument=arguments[id(value.tensor)])
    return _TappedStart(tensor=value.tensor) if value.origin == "parameter" else None


def site_of(trace: Trace, value: Value | None, *, written: bool = False) -> Site | None:
    """Return the place that made a value; None if no operation did, or if it is `written` and that is not allowed."""
    if value is None or value.op < 0:
        return None
    if not written and (value.copy is not None or (value.store is not None and value.store.writes)):
        return None
    op = trace.ops[value.op]
    in_place = any(value.tensor is tensor for tensor, _ in op.reads) and op.name not in OVERWRITES
    if op.name == "alias" or (written and in_place):
        return None
    return (*caller_of(trace, op), value.place)


def caller_of(trace: Trace, op: Op) -> tuple[Any, Chain]:
    """Return the identity of an operation: its function and instructions, or a module and the code that calls it."""
    way = way_to(op.scope, op.offset)
    return (trace.calls[op.call].module, way[-1:]) if op.name.endswith(".forward") else (op.func, way)


def way_to(scope: Scope, offset: int) -> Chain:
    """Return an instruction of the trace in the form of `chain_of`."""
    chain: list[tuple[CodeType, int]] = []
    while True:
        call = _call(scope)
        if not chain or chain[-1] != (call.code, offset):
            chain.append((call.code, offset))
        if not in_torch(call.code) or call.parent is None:
            return tuple(chain)
        scope, offset = call.parent, call.key


def _call(scope: Scope) -> Scope:
    while scope.kind != "call" and scope.parent is not None:
        scope = scope.parent
    return scope


def offsets_of(chains: Iterable[Chain]) -> frozenset[int]:
    """Return the code offsets of the innermost instructions of chains."""
    return frozenset(chain[0][1] for chain in chains if chain)


def may_be_at(frame: FrameType, offsets: Set[int] | None) -> bool:
    """Say whether a frame's chain may have one of these offsets: this is cheaper than making the chain."""
    return offsets is not None and (frame.f_lasti in offsets or is_between(frame.f_code))


def chain_of(frame: FrameType | None) -> Chain:
    """Return the present instruction of a frame, and those that lead to it."""
    chain: list[tuple[CodeType, int]] = []
    while frame is not None:
        code = frame.f_code
        # A function of torch's that is written in Python is met once for each active mode.
        if not is_between(code) and (not chain or chain[-1] != (code, frame.f_lasti)):
            chain.append((code, frame.f_lasti))
            if not in_torch(code):
                break
        frame = frame.f_back
    return tuple(chain)
