"""Whether a loop passes a cell exactly what the cell returned, and whether anything else crosses with it."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from typing import Any

import torch

from .candidates import Analysis
from .chains import Chain
from .memory import Value
from .operation import BLENDS, MOVES, OVERWRITES, ModuleCall, Op
from .places import Scope
from .trace import Trace

_FAR = 512  # values to go back from an argument


def changed_on_the_way(
    trace: Trace, calls: list[ModuleCall], states: set[tuple[Any, ...]], loop: Scope | None
) -> str | None:
    """Return the line that changes a cell's state between its result and its next argument; None if there is none."""
    given: dict[int, int] = {}
    for number, call in enumerate(calls):
        for place, value in call.args:
            if number and place in states:
                line = _where_changed(trace, value, place, given, calls, number, loop)
                if line is not None:
                    return line
        given.update({value.number: number for _, value in call.results})
    return None


def _where_changed(
    trace: Trace,
    value: Value,
    place: tuple[Any, ...],
    given: dict[int, int],
    calls: list[ModuleCall],
    number: int,
    loop: Scope | None,
) -> str | None:
    """Return the line that makes the argument from an earlier result; None if the argument is that result itself."""
    todo, read, hits = [value], {value.number: [value]}, []
    for one in todo:
        if one.number in given:
            hits.append(one)
        elif one.op >= calls[0].start and len(todo) < _FAR:
            for source in trace.ops[one.op].ins:
                todo += [source] if source.number not in read else []
                read.setdefault(source.number, []).append(one)
    if not hits or any(_same(value, hit) for hit in hits):
        return None
    ops = _onward(read, hits)
    first = next((v for where, v in calls[0].args if where == place), None)
    if first is not None and loop is not None:
        begins = loop.turns[bisect_right([turn.start for turn in loop.turns], calls[number].start) - 1].start
        if min(ops) >= begins:
            return None  # the first step of the next call would do the same to the carried state
    line = trace.ops[max(ops)].where
    return f" ({line})" if line else ""


def _onward(read: dict[int, list[Value]], hits: list[Value]) -> set[int]:
    """Return the operations between a cell's result and its next argument."""
    todo, ops = list(hits), set()
    for one in todo:
        for made in read[one.number]:
            if made is not one and made.op not in ops:
                ops.add(made.op)
                todo.append(made)
    return ops


def _same(one: Value, other: Value) -> bool:
    ours, theirs = one.data(), other.data()
    if ours is None or theirs is None or one is other:
        return True  # assume so if it cannot be decided
    if ours.numel() != theirs.numel() or ours.dtype.is_complex != theirs.dtype.is_complex:
        return False
    ours, theirs = ours.flatten(), theirs.flatten()
    if not ours.is_floating_point():
        return bool(torch.equal(ours, theirs.to(ours.dtype)))
    return bool(torch.allclose(ours, theirs.to(ours.dtype), 1e-5, 1e-7, equal_nan=True))


def crossing_beside(analysis: Analysis, calls: list[ModuleCall], loop: Scope | None) -> list[str]:
    """Name values that cross in the same loop, and start anew in every call."""
    if loop is None or not calls:
        return []
    names: dict[str, None] = {}
    gave = {value.number for call in calls for _, value in call.results}
    for candidate in analysis.candidates:
        if candidate.kind == "loop" and candidate.windows.scope is loop:
            for draft in candidate.drafts:
                own = any(value is not None and value.number in gave for value in draft.values)
                if not own and not goes_on(analysis.trace, draft.initial):
                    names[draft.name] = None
    return list(names)


def goes_on(trace: Trace, start: Value | None) -> bool:
    """Say whether a part starts from an argument of the caller, or from what the model keeps."""
    todo = [start] if start is not None else []
    for value in todo:
        if value.origin in ("argument", "attribute", "buffer"):
            return True
        if value.op >= 0 and trace.ops[value.op].name in MOVES:
            todo += trace.ops[value.op].ins
    return False


def summing_up(analysis: Analysis, inputs: list[list[Value]], loop: Scope | None) -> list[str]:
    """Name values that accumulate into a cell's input and belong to no recurrence, such as a counter."""
    if loop is None:
        return []
    trace, starts = analysis.trace, [turn.start for turn in loop.turns]
    states = {number for one in analysis.candidates for number in one.numbers}
    states.update(analysis.settled, *(chain.on_the_way for chain in analysis.chains))
    for values in inputs:
        todo: list[tuple[Value, int]] = [(values[-1], 0)]  # with the number of turns gone back
        seen = {values[-1].number}
        for value, back in todo:
            if not loop.start <= value.op < loop.end or value.number in states or len(todo) > _FAR:
                continue
            if back > 1:
                return [f"what {trace.ops[value.op].where} makes"]
            here = bisect_right(starts, value.op)
            for source in trace.ops[value.op].ins:
                if source.number not in seen:
                    seen.add(source.number)
                    todo.append((source, back + (loop.start <= source.op and bisect_right(starts, source.op) < here)))
    return []


def entangled(analysis: Analysis) -> Iterator[str]:
    """Name cells whose own start cannot be replaced by a state, since other code uses it too.

    Either their results pass an operation on the way back, whatever it did in this call, or others read them as well.
    """
    trace = analysis.trace
    for chain in analysis.chains:
        loop = _around(trace, chain)
        for place, links in chain.parts.items():
            ops = [trace.ops[trace.memory.values[number].op] for link in links for number in link.path]
            changing = [op for op in ops if op.name not in MOVES and not op.name.endswith(".forward")]
            changing = [op for op in changing if not any(_inside(op, call, trace) for call in chain.calls)]
            start = chain.initial(place)
            if changing:
                yield f"{chain.path}: what it gave passes {changing[0].where} on its way back"
            elif start is not None and loop is not None and (line := _masked_at_first(trace, start, loop)):
                yield f"{chain.path}: what it starts from passes {line} in the first turn"
            elif start is not None and loop is not None and (line := _read_beside(trace, chain, start, loop)):
                yield f"{chain.path}: its state is read at {line} too"


def _masked_at_first(trace: Trace, start: Value, loop: Scope) -> str:
    """Return where a loop, in its first turn, mixes or overwrites a value made before it that a cell starts from."""
    line, todo = "", [start]
    for value in todo:
        if value.op < loop.start:
            return line
        op = trace.ops[value.op]
        if op.name not in MOVES | BLENDS | OVERWRITES:
            continue
        line = op.where if op.name in BLENDS | OVERWRITES | {"__setitem__", "alias"} else line
        todo += [each for each in op.ins if each.tensor.numel() == start.tensor.numel()]
    return ""


def _around(trace: Trace, chain: Chain) -> Scope | None:
    begin, end = chain.calls[0].start, chain.calls[-1].end
    loops = [one for one in trace.places.scopes if one.kind == "loop" and one.start <= begin and end <= one.end]
    return max(loops, key=lambda one: one.start, default=None)


def _inside(op: Op, call: ModuleCall, trace: Trace) -> bool:
    number = op.call
    while number > call.number:
        number = trace.calls[number].parent
    return number == call.number


def _read_beside(trace: Trace, chain: Chain, start: Value, loop: Scope) -> str:
    """Return where a loop reads a cell's start, apart from that cell and others that start from it."""
    for number in range(loop.start, chain.calls[1].end):
        op = trace.ops[number]
        cells = (op.call >= 0 and trace.calls[op.call].known) or any(_inside(op, c, trace) for c in chain.calls[:2])
        if not cells and any(value.number == start.number for value in op.ins):
            return op.where
    return ""
