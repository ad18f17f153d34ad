"""The starts of loops: the value a loop starts from, and where its first turns read it, so that it can be replaced.

A place in the code is the instruction that makes or reads a value, as in `taps.py`. If several tensors pass there, the
right one is identified by the object itself, never by its number alone.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

from torch import nn

from .candidates import Analysis, Candidate, Draft
from .memory import Value
from .operation import MOVES, OVERWRITES, ModuleCall
from .repetition import Windows
from .taps import Chain, Site, caller_of, site_of
from .trace import Trace

# Function, instructions, index of the operand, and how many reads of the start came before; -1: any. If a module with
# unobserved operations reads it: the module, and the user's instruction that calls it.
Reader: TypeAlias = tuple[Any, Chain, int, int]


@dataclass(frozen=True, slots=True, eq=False)
class OwnStart:
    """The start of one part of a loop, made or held by the model itself."""

    part: str
    site: Site | None = None  # the place that makes it
    number: int = 0  # its number among the values made there
    label: str = ""  # or the name of the parameter, buffer or attribute that holds it
    readers: frozenset[Reader] = frozenset()  # the places that read it as the state; none if it is replaced when made
    kept_in: str = ""  # the name of the buffer or attribute that it is a copy of
    alias: bool = False  # it is read through another tensor in the same memory, which was made unseen
    end: Site | None = None  # the place where every turn makes the part, if it makes nothing else


@dataclass(frozen=True, slots=True, eq=False)
class LoopStart:
    """The starts of all parts of a loop, or the reason why they cannot be replaced."""

    parts: tuple[OwnStart, ...] = ()
    why_not: str = ""
    feeds: frozenset[str] = frozenset()  # cells whose first state a turn makes from the start


def start_of(trace: Trace, candidate: Candidate) -> LoopStart:
    """Return the starts of a loop."""
    if candidate.kind not in ("loop", "layer"):
        return LoopStart(why_not=f"it is no loop, but {candidate.kind}")
    shared = Counter(draft.initial.number for draft in candidate.drafts if draft.initial is not None)
    owners = _owners(candidate.windows, candidate.drafts)
    parts = []
    for draft in candidate.drafts:
        try:
            part = _own_start(trace, candidate, (draft, _is_shared(draft, shared)), owners)
            parts.append(replace(part, end=_end(trace, draft), kept_in=_copied_from(trace, draft.initial)))
        except _NotOwn as problem:
            return LoopStart(why_not=f"{draft.name} {problem}")
    return LoopStart(tuple(parts), feeds=frozenset(_fed(trace, candidate)))


def _copied_from(trace: Trace, value: Value | None) -> str:
    """Return the name of what a start is a copy of, if the model holds it and it was only moved or detached."""
    while value is not None and value.op >= 0:
        op = trace.ops[value.op]
        if op.name not in MOVES or len(op.ins) != 1:
            return ""
        value = op.ins[0]
    return value.label if value is not None and value.origin in ("buffer", "attribute") else ""


def _end(trace: Trace, draft: Draft) -> Site | None:
    """Return the place where every turn makes a part, if nothing else is made there."""
    if any(value is None or value.op < 0 or trace.ops[value.op].name == "alias" for value in draft.values):
        return None
    made_by = [(trace.ops[value.op], value.place) for value in draft.values if value is not None]
    sites = {(*caller_of(trace, op), place) for op, place in made_by}
    if len(sites) != 1:
        return None
    site = sites.pop()
    made = sum(caller_of(trace, op) == site[:2] for op in trace.ops if op.name == made_by[0][0].name)
    return site if made == len(draft.values) else None


def _fed(trace: Trace, candidate: Candidate) -> Iterator[str]:
    """Yield the paths of known modules whose first state is made from the loop's own start, inside the loop."""
    begin, end = candidate.span
    own = {draft.initial.number for draft in candidate.drafts if draft.initial is not None}
    later = {value.number for draft in candidate.drafts for value in draft.values if value is not None}
    calls: dict[nn.Module, list[ModuleCall]] = defaultdict(list)
    for call in trace.calls:
        if call.known and begin <= call.start < end:
            calls[call.module].append(call)
    for call, *others in calls.values():
        # A start that is passed unchanged may also start something else: then later calls are given something else.
        same = {place for other in others for place, value in other.args if value.number in later}
        state = [(place, value) for place, value in call.args if place[1:2] != (0,)]
        todo = [value for place, value in state if value.number not in own or place in same]
        seen = set[int]()
        for value in todo:
            if value.number in own:
                yield call.path
                break
            if value.op >= begin and value.number not in seen:
                seen.add(value.number)
                todo += trace.ops[value.op].ins


def handed_in(analysis: Analysis) -> frozenset[str]:
    """Return the paths of modules whose first state came with the call of the model, perhaps masked on the way."""
    trace = analysis.trace
    return frozenset(path for path, value in first_states(analysis) if _is_handed_in(trace, value))


def first_states(analysis: Analysis) -> Iterator[tuple[str, Value]]:
    """Yield the paths of layers and cells, with the state that each is given in its first call."""
    seen = set[nn.Module]()
    for call in analysis.trace.calls:
        places = {place for chain in analysis.chains if chain.module is call.module for place in chain.parts}
        if call.module in seen or not (call.known or places):
            continue
        seen.add(call.module)
        for place, value in call.args:
            if place in places or (call.known and place[1:2] != (0,)):
                yield call.path, value


def _is_handed_in(trace: Trace, value: Value) -> bool:
    size, todo = value.tensor.numel(), [value]
    for one in todo:
        if one.op < 0:
            if one.origin == "argument" and one.tensor.numel() == size:
                return True
        elif len(todo) < _FAR and not any(each.origin == "parameter" for each in trace.ops[one.op].ins):
            todo += [each for each in trace.ops[one.op].ins if each.tensor.numel() == size]  # a mask is smaller
    return False


_FAR = 64  # values to go back from a state


def starts_only(analysis: Analysis, label: str) -> bool:
    """Say whether the value under a name in the model is only used as a start of known layers and loops."""
    trace, starts = analysis.trace, set[int]()
    for candidate in analysis.candidates:
        if candidate.kind in ("loop", "layer", "cell"):
            starts |= {draft.initial.number for draft in candidate.drafts if draft.initial is not None}
    for call in trace.calls:
        if call.known:
            starts |= {value.number for place, value in call.args if place[1:2] != (0,)}
    reached = {value.number for value in trace.memory.values if value.label == label and value.op < 0} - starts
    for op in trace.ops:
        if any(value.number in reached for value in op.ins):
            if op.name not in MOVES:
                return False
            reached |= {value.number for value in op.outs} - starts
    return not any(value.number in reached for call in trace.calls[:1] for _, value in call.results)


class _NotOwn(Exception):
    """The reason why a start cannot be replaced."""


_Owners: TypeAlias = "dict[tuple[int, int], Draft]"


def _is_shared(draft: Draft, shared: Mapping[int, int]) -> bool:
    return draft.initial is not None and shared[draft.initial.number] > 1


def _owners(windows: Windows, drafts: Sequence[Draft]) -> _Owners:
    """Return which part is read at each place, and as which operand, from the second turn on."""
    found: _Owners = {}
    for turn in range(1, min(3, windows.count)):
        numbers = {value.number: draft for draft in drafts if (value := draft.values[turn - 1]) is not None}
        for number, op in windows.of_turn(turn):
            for position, (_, value) in enumerate(op.reads):
                if value.number in numbers:
                    found.setdefault((windows.place(number), position), numbers[value.number])
    return found


def _own_start(trace: Trace, candidate: Candidate, whose: tuple[Draft, bool], owners: _Owners) -> OwnStart:
    draft, shared = whose
    value = draft.initial
    if value is None:
        raise _NotOwn("starts from nothing: its first turn takes another way")
    if value.op < 0 and value.origin == "argument":
        raise _NotOwn("is handed in by the caller, who knows what it goes on from")
    if value.op < 0 and value.origin not in ("parameter", "buffer", "attribute"):
        raise _NotOwn("starts from a tensor whose origin was not seen")
    source = _source(trace, value)
    if value.overwritten:
        return OwnStart(draft.name, **_written(trace, candidate, value, source))
    readers = _readers(trace, candidate.windows, value, ((draft, shared), owners))
    if not readers:
        raise _NotOwn("is not read in the first turns as it is in later ones")
    return OwnStart(draft.name, **source, readers=frozenset(readers))


def _source(trace: Trace, value: Value) -> dict[str, Any]:
    if value.op < 0:
        return {"label": value.label}
    op = trace.ops[value.op]
    if op.name == "alias" and len(op.ins) == 1 and op.ins[0].shape == value.shape and not value.overwritten:
        return {**_source(trace, op.ins[0]), "alias": True}
    site = site_of(trace, value, written=True)
    if site is None:
        raise _NotOwn("starts from something that was put together in memory")
    return {"site": site, "number": _number(trace, site, value)}


def _number(trace: Trace, site: Site, value: Value) -> int:
    """Return the number of values that were made at this place before."""
    function, _, place = site
    same = (op for op in trace.ops[: value.op] if op.func is function)
    return sum(any(v.place == place and site_of(trace, v, written=True) == site for v in op.outs) for op in same)


def _written(trace: Trace, candidate: Candidate, value: Value, source: dict[str, Any]) -> dict[str, Any]:
    """Return where a start is made that is written later: it is replaced there, if nothing else reads it."""
    if "site" not in source:
        raise _NotOwn("is written where the model keeps it")
    if trace.ops[value.op].name in OVERWRITES:  # others that hold the tensor would not get the replacement
        raise _NotOwn("is written where it lies")
    if trace.ops[value.op].name in MOVES:  # a view of something larger
        raise _NotOwn("is a part of a tensor that is written in pieces")
    begin, end = candidate.span
    for number, op in enumerate(trace.ops):
        if not begin <= number < end and number != value.op and any(v.number == value.number for v in op.ins):
            raise _NotOwn(f"is written, and read at {op.where} too")
    return source


def _readers(trace: Trace, windows: Windows, value: Value, whose: tuple[tuple[Draft, bool], _Owners]) -> set[Reader]:
    """Return the places that read a loop's start as the state: in the first turns only, unlike a constant."""
    (draft, shared), owners = whose
    read: dict[tuple[int, int], list[int]] = defaultdict(list)
    times: dict[tuple[int, int], int] = {}  # by operation and operand: how often the start was read there before
    turns: Counter[int] = Counter()
    seen: Counter[tuple[Any, Chain, int]] = Counter()
    for turn in range(windows.count):
        for number, op in windows.of_turn(turn):
            place = windows.place(number)
            turns[place] += 1
            for position, (_, one) in enumerate(op.reads):
                if one.number == value.number:
                    read[place, position].append(number)
                    if shared:
                        there = (*caller_of(trace, op), position)
                        times[number, position] = seen[there]
                        seen[there] += 1
    found: set[Reader] = set()
    for (place, position), numbers in read.items():
        if len(numbers) == turns[place] > 1:
            continue  # read in every turn: a constant, from which the state happens to start
        owner = owners.get((place, position))
        for number in numbers:
            turn, op = windows.turn(number), trace.ops[number]
            handed_on = owner is not None and turn > 0 and owner.values[turn - 1] is value  # it is another part by then
            if owner is not draft and not handed_on and (owner is not None or turns[place] > len(numbers)):
                continue  # later turns read something else there: another part, or the state of a cell
            if owner is None and shared:
                raise _NotOwn("starts from what other parts start from too, and who reads which cannot be told")
            if op.name == "alias":
                raise _NotOwn(f"is read at {op.where} by what cannot be handed something else")
            function, way = caller_of(trace, op)
            # The same operation may also read the start as a constant: `where(done, start, h)`.
            found.add((function, way, position, times.get((number, position), -1)))
    return found
