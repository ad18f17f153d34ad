"""From a trace to what recurs in it: chains of module calls first, then what else crosses in loops."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from .candidates import Analysis
from .cell_calls import take_chains
from .crossing import Role, complete, roles_of
from .loops import take_loop
from .places import Scope
from .repetition import Windows, from_input, where_of, windows_of
from .trace import Trace
from .traits import collects, grows_by_joining, pieces_of

_RUNS = 32  # runs of one loop after which further ones are not looked at, if none was in time


def analyze(trace: Trace) -> Analysis:
    """Return what recurs in a traced call."""
    analysis = Analysis(trace, from_input(trace), from_input(trace, draws=True))
    windows: dict[Scope, Windows] = {}
    roles: dict[Scope, list[Role]] = {}
    runs: dict[Any, list[bool]] = defaultdict(list)
    for loop in trace.places.scopes:
        if loop.kind != "loop" or len(loop.turns) < 2:
            continue
        before = runs[loop.code, loop.key]
        if len(before) >= _RUNS and not any(before):
            continue  # an inner loop that runs at every step: its first runs tell
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
    take_chains(analysis, roles)
    for loop in loops:
        if roles[loop]:
            take_loop(analysis, loop, windows[loop], roles[loop])
    return analysis


def _is_constant(role: Role) -> bool:
    """Say whether the first turn makes something for itself and all others, which never changes."""
    return role.initial is not None and all(value is role.initial for value in role.values)


def _in_time(analysis: Analysis, windows: Windows, roles: list[Role]) -> bool:
    """Say whether a loop as a whole takes the call's input piece by piece, on the way to anything that crosses."""
    roles = [role for role in roles if not role.grows and not collects(windows, role, roles)]
    if not roles:
        return False
    targets = [[v for role in roles if (v := role.values[turn]) is not None] for turn in range(windows.count)]
    return pieces_of(windows, targets, analysis.marks).own
