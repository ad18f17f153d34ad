"""From a trace to candidates: chains of module calls, then other crossings in loops; nested loops are joined."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from .candidates import Analysis, Candidate, collects, grows_by_joining, pieces_of
from .crossings import Role, complete, roles_of
from .loops import take_loop
from .memory import Value
from .operation import MOVES
from .places import Scope
from .repetition import Windows, from_input, where_of, windows_of
from .stepped_cells import take_chains
from .trace import Trace

_RUNS = 32  # runs of one loop to examine; if none of them was in time, later runs are skipped


def analyze(trace: Trace, *, cells: bool = True) -> Analysis:
    """Return the candidates in a traced call, with what was examined and what was left out.

    Without `cells`, all that crosses the turns of a loop belongs to the loop, even if a module passes it on.
    """
    analysis = Analysis(trace, from_input(trace), from_input(trace, draws=True))
    windows: dict[Scope, Windows] = {}
    roles: dict[Scope, list[Role]] = {}
    runs: dict[Any, list[bool]] = defaultdict(list)
    for loop in trace.places.scopes:
        if loop.kind != "loop" or len(loop.turns) < 2:
            continue
        before = runs[loop.code, loop.key]
        if len(before) >= _RUNS and not any(before):
            continue  # an inner loop that runs at every step: its first runs are enough
        windows[loop] = windows_of(trace, loop)
        crossing = roles_of(windows[loop])
        fixed = [role for role in crossing if _is_constant(role)]
        if not complete(windows[loop], crossing):
            analysis.incomplete.add(loop)
        roles[loop] = [role for role in crossing if role not in fixed]
        if fixed:
            analysis.settled.update(*(role.members for role in fixed))
            analysis.leave(
                where_of(windows[loop]), "the first repetition makes something for all, which stays as it is"
            )
        analysis.settled.update(*(role.members for role in roles[loop] if grows_by_joining(windows[loop], role)))
        before.append(_in_time(analysis, windows[loop], roles[loop]))
        if before[-1]:
            analysis.timed.add(loop)
    loops = list(windows)
    if cells:
        take_chains(analysis, roles)
    for loop in loops:
        if roles[loop]:
            take_loop(analysis, loop, windows[loop], roles[loop])
    _merge(analysis)
    return analysis


def _is_constant(role: Role) -> bool:
    """Say whether the first turn makes a value for all turns, which never changes."""
    return role.initial is not None and all(value is role.initial for value in role.values)


def _in_time(analysis: Analysis, windows: Windows, roles: list[Role]) -> bool:
    """Say whether a loop takes the call's input piece by piece on the way to something that crosses."""
    roles = [role for role in roles if not role.grows and not collects(windows, role, roles)]
    if not roles:
        return False
    targets = [[v for role in roles if (v := role.values[turn]) is not None] for turn in range(windows.count)]
    return pieces_of(windows, targets, analysis.marks).own


_TIME = {"cell", "loop", "layer", "attribute"}
_MOST = 64  # runs of one loop to list separately


def _merge(analysis: Analysis) -> None:
    """Join loops that continue each other, and drop repetitions inside a repetition or described by a finer loop."""
    analysis.candidates = _joined(analysis.trace, analysis.candidates)
    _drop_inner_iterations(analysis)
    _drop_coarser(analysis)
    _drop_repeats(analysis)


def _joined(trace: Trace, candidates: list[Candidate]) -> list[Candidate]:
    kept: list[Candidate] = []
    last: dict[tuple[str, str, str, int], Candidate] = {}
    for candidate in candidates:
        key = (candidate.kind, candidate.module, candidate.line, len(candidate.drafts))
        before = last.get(key)
        if (
            before is not None
            and candidate.kind in ("loop", "layer", "attribute")
            and _goes_on(trace, before, candidate)
        ):
            _append(before, candidate)
            continue
        last[key] = candidate
        kept.append(candidate)
    return kept


def _goes_on(trace: Trace, before: Candidate, after: Candidate) -> bool:
    """Say whether a loop starts from the values in which another run of it ended."""
    for one, other in zip(before.drafts, after.drafts, strict=True):
        end, start = one.values[-1], other.initial
        if end is None or start is None or one.name != other.name or not moved_from(trace, start, {end.number}):
            return False
    return True


def _append(before: Candidate, after: Candidate) -> None:
    for one, other in zip(before.drafts, after.drafts, strict=True):
        one.values = [*one.values, *other.values]
    first, second = before.windows, after.windows
    gaps = (*first.gaps, (first.end, second.starts[0]))
    before.windows = Windows(first.trace, [*first.starts, *second.starts], second.end, first.scope, gaps)
    if not any("continue" in sentence for sentence in before.evidence):
        before.evidence.append("several runs of the loop continue each other")


def _drop_inner_iterations(analysis: Analysis) -> None:
    kept = []
    for one in analysis.candidates:
        inside = one.kind == "iteration" and any(
            other.kind in _TIME and _inside_a_turn(one, other) for other in analysis.candidates
        )
        if inside:
            analysis.leave((one.module, one.line), "an iteration within each repetition of a recurrence")
        else:
            kept.append(one)
    analysis.candidates = kept


def _inside_a_turn(inner: Candidate, outer: Candidate) -> bool:
    start, end = inner.span
    turn = outer.windows.turn(start)
    return inner is not outer and turn >= 0 and end <= outer.windows.span(turn)[1] and start < outer.windows.end


def _drop_coarser(analysis: Analysis) -> None:
    """Drop from an outer loop what a finer recurrence inside it already describes step by step."""
    for outer in analysis.candidates:
        if outer.kind not in ("loop", "layer", "cell", "iteration"):
            continue
        low, high = outer.span
        finer: set[int] = set()
        for inner in analysis.candidates:
            longer = inner is not outer and inner.kind in _TIME and inner.windows.count > outer.windows.count
            if longer and low <= inner.span[0] and inner.span[1] <= high:
                finer |= inner.numbers
        outer.drafts = [
            draft
            for draft in outer.drafts
            if not all(moved_from(analysis.trace, value, finer) for value in draft.values if value is not None)
        ]
    analysis.candidates = [candidate for candidate in analysis.candidates if candidate.drafts]


def moved_from(trace: Trace, value: Value, numbers: set[int]) -> bool:
    """Say whether a value is one of these after moves only, such as views and copies."""
    for _ in range(8):
        if value.number in numbers:
            return True
        if value.op < 0 or trace.ops[value.op].name not in MOVES or len(trace.ops[value.op].ins) != 1:
            return False
        value = trace.ops[value.op].ins[0]
    return False


def _drop_repeats(analysis: Analysis) -> None:
    runs: dict[tuple[str, str, str], list[Candidate]] = defaultdict(list)
    for candidate in analysis.candidates:
        runs[candidate.kind, candidate.module, candidate.line].append(candidate)
    dropped: set[int] = set()
    for group in runs.values():
        limit = 1 if group[0].kind == "iteration" else _MOST
        if len(group) > limit:
            group[0].evidence.append(f"and {len(group) - limit} further runs of it, not listed")
            dropped.update(id(each) for each in group[limit:])
    analysis.candidates = [candidate for candidate in analysis.candidates if id(candidate) not in dropped]
