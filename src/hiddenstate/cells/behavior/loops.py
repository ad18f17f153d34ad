"""Recurrence in loops that is not passed on by modules: loops, layers, iterations, attributes, caches."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import Any

from .candidates import TOO_FEW, Analysis, Candidate, Draft, collects, grows_by_joining, how, pieces_of, problem_of
from .crossings import Role
from .found import Kind
from .memory import Value
from .names import Binding, Namer, module_tensors
from .operation import MOVES, Op
from .places import Scope
from .repetition import Windows, owner_of, reaching, signature, where_of
from .trace import Trace


def take_loop(analysis: Analysis, loop: Scope, windows: Windows, roles: list[Role]) -> None:
    """Add the values that cross in a loop and are not passed on by a module."""
    where = where_of(windows)
    roles = [role for role in roles if grows_by_joining(windows, role) or not _accounted(analysis, role)]
    if not roles:
        return
    caches = [role for role in roles if grows_by_joining(windows, role)]
    rest = [role for role in roles if role not in caches]
    sums = [role for role in rest if collects(windows, role, roles)]
    caches, idle = _read_caches(windows, caches, roles)
    if sums or idle:
        analysis.leave(where, "a sum or list only collects: nothing within the loop reads it")
    rest = [role for role in rest if role not in sums]
    if caches and _in_depth(analysis, windows, [*caches, *rest]):
        analysis.leave(where, "each repetition has weights of its own: layers in depth, not time")
        return
    if rest:
        _take_roles(analysis, loop, windows, rest, where)
    for role in caches:
        _take_cache(analysis, loop, windows, role, where)


def _in_depth(analysis: Analysis, windows: Windows, roles: list[Role]) -> bool:
    """Say whether all values in the loop are made with weights that change from turn to turn."""
    turns = range(windows.count)
    made = [[v for _, op in windows.of_turn(turn) for v in op.outs] for turn in turns]
    return pieces_of(windows, made, analysis.marks).depth


def _accounted(analysis: Analysis, role: Role) -> bool:
    """Say whether a module's chain already carries this value, as it is or in a larger tensor."""
    inside = sum(_moved_from(analysis, n) for n in role.members)
    return inside >= max(1, 0.8 * len(role.members))


def _moved_from(analysis: Analysis, number: int, depth: int = 6) -> bool:
    if number in analysis.covered:
        return True
    value = analysis.trace.memory.values[number]
    if depth == 0 or value.op < 0 or analysis.trace.ops[value.op].name not in MOVES:
        return False
    sources = analysis.trace.ops[value.op].ins
    return bool(sources) and all(_moved_from(analysis, source.number, depth - 1) for source in sources)


def _read_caches(windows: Windows, caches: list[Role], roles: list[Role]) -> tuple[list[Role], list[Role]]:
    idle = [role for role in caches if not role.grows and collects(windows, role, roles)]
    return [role for role in caches if role not in idle], idle


def _take_cache(analysis: Analysis, loop: Scope, windows: Windows, role: Role, where: tuple[str, str]) -> None:
    if not any(analysis.marks[number] for number in role.members):
        return
    if windows.count < 3:
        return
    namer = Namer.of(analysis.trace, loop)
    name = namer.listed(role.values[0]) if role.grows else ""
    name = name or namer.name(role.values, "cache")
    draft = Draft(name, role.values, role.initial)
    evidence = ["it gets longer with every repetition: a cache, not a state of fixed size"]
    analysis.candidates.append(Candidate("cache", *where, windows, [draft], evidence))


def _take_roles(analysis: Analysis, loop: Scope, windows: Windows, roles: list[Role], where: tuple[str, str]) -> None:
    if not any(analysis.moves[number] for role in roles for number in role.members):
        analysis.leave(where, "what crosses does not depend on the call's input")
        return
    targets = [[v for role in roles if (v := role.values[turn]) is not None] for turn in range(windows.count)]
    around = _states_around(analysis, windows)
    begun = {role.initial.number for role in roles if role.initial is not None}
    pieces = pieces_of(windows, targets, analysis.marks, around, starts=begun)
    own = pieces.own or (loop in analysis.timed and not around)
    if pieces.depth:
        analysis.leave(where, "each repetition has weights of its own: layers in depth, not time")
        return
    crossing = {number for role in roles for number in role.members}
    problem = problem_of(windows, crossing, pieces.strange)
    if not problem and loop in analysis.incomplete and windows.count > 2:
        problem = "what crosses goes other ways in other repetitions: which value is which could not be told"
    if problem:
        analysis.doubt(where, problem)
        return
    if not own and (line := _shifts(windows, crossing)):
        analysis.doubt(where, f"{line} shifts what crosses, each time by another distance: it may be a scan along time")
        return
    changing = any(len({v.shape for v in role.values if v is not None}) > 1 for role in roles)
    if windows.count < 3:
        if own and not changing:
            analysis.doubt(where, TOO_FEW)
        else:
            analysis.leave(
                where, "only two repetitions, and what crosses changes its size or takes nothing of the input"
            )
        return
    if changing:
        if pieces.weights or own:
            analysis.doubt(where, "what crosses changes its size from repetition to repetition")
        else:
            analysis.leave(where, "what crosses changes its size from repetition to repetition")
        return
    for kind, place, group in _grouped(analysis, loop, windows, roles, where):
        if kind == "attribute" and not any(analysis.marks[number] for role in group for number in role.members):
            analysis.leave((place, where[1]), "what is kept there does not depend on the call's input: a statistic")
            analysis.settled.update(*(role.members for role in group))
            continue
        namer = Namer.of(analysis.trace, loop)
        drafts = [Draft(namer.name(r.values, f"state{i}"), r.values, r.initial) for i, r in enumerate(group)]
        names = ", ".join(draft.name for draft in drafts)
        turns, starts = windows, [start for draft in drafts if (start := _start(analysis, draft))]
        before = first_step(windows, drafts) if own and len(starts) == len(drafts) else None
        if before is not None:
            turns = Windows(windows.trace, [before, *windows.starts], windows.end, loop)
            starts = [f"the first repetition is written before the loop, at {analysis.trace.ops[before].where}"]
            for draft in drafts:
                draft.values, draft.initial = [draft.initial, *draft.values], None
        evidence = [f"{names} cross{'es' if len(drafts) == 1 else ''} {turns.count - 1} times", how(own), *starts]
        final: Kind = kind if own else "iteration"
        analysis.candidates.append(Candidate(final, place, where[1], turns, drafts, evidence))


def _shifts(windows: Windows, crossing: set[int]) -> str:
    """Return where a loop shifts the crossing values along an axis by a growing number, as in doubling."""
    seen: dict[int, list[Any]] = defaultdict(list)
    lines: dict[int, str] = {}
    for turn in range(windows.count):
        for number, op in windows.of_turn(turn):
            if op.name in _SHIFTS and any(value.number in crossing for value in op.ins):
                seen[windows.place(number)].append(signature((op.args[1:], tuple(op.kwargs.values()))))
                lines[windows.place(number)] = op.where
    most = max(2, windows.count - 1)  # the first turn may begin from something else
    moving = (place for place, found in seen.items() if len(set(found)) == len(found) >= most)
    return next((lines[place] for place in moving), "")


_SHIFTS = {"pad", "_pad", "roll", "narrow", "__getitem__", "slice"}


def _start(analysis: Analysis, draft: Draft) -> str:
    """Describe the start of a part if an operation before the loop made it from the call's input."""
    start = draft.initial
    if start is None or start.op < 0 or not analysis.marks[start.number]:
        return ""
    return f"{draft.name} starts from what {analysis.trace.ops[start.op].where} made before the loop"


def _states_around(analysis: Analysis, windows: Windows) -> set[int]:
    """Return the values that recurrences around this loop carry in time."""
    found: set[int] = set()
    for other in analysis.candidates:
        low, high = other.span
        inside = windows.starts[0] <= low and high <= windows.end
        if other.kind not in ("iteration", "cache") and low < windows.end and windows.starts[0] < high and not inside:
            found |= other.numbers
    return found


def _grouped(
    analysis: Analysis, loop: Scope, windows: Windows, roles: list[Role], where: tuple[str, str]
) -> Iterator[tuple[Kind, str, list[Role]]]:
    """Yield the values that modules keep in attributes, one group for each module, then those that the loop keeps."""
    kept: dict[str, list[Role]] = {}
    own: list[Role] = []
    namer = Namer.of(analysis.trace, loop)
    for role in roles:
        module = _keeper(analysis.trace, windows, role)
        held, start = namer.seen(role.values), role.initial
        if module is None and start is not None and _goes_on_from(analysis, start, held):
            module = start.label.rpartition(".")[0]
        if module is not None and held is not None and held.module is not None:
            module = analysis.trace.paths.get(held.module, module)
        if module is None:
            own.append(role)
        else:
            kept.setdefault(module, []).append(role)
    for module, group in kept.items():
        yield "attribute", module, group
    if own:
        yield _loop_kind(analysis.trace, windows, own), where[0], own


def _goes_on_from(analysis: Analysis, start: Value, held: Binding | None) -> bool:
    """Say whether a loop starts from a value that an earlier call left in the attribute holding the state.

    If this call leaves nothing there that depends on its input, then neither did an earlier one: it is a plain start.
    """
    if held is None or held.module is None or start.origin not in ("buffer", "attribute"):
        return False
    left = analysis.trace.peek(dict(module_tensors(held.module)).get(held.name, start.tensor))
    begins_anew = left is not None and not analysis.marks[left.number]
    return start.label.split(".")[-1] == held.name and not begins_anew


def _keeper(trace: Trace, windows: Windows, role: Role) -> str | None:
    """Return the module that is called in every turn and both makes and reads a value inside these calls."""
    begin = windows.starts[0]
    owner = owner_of(trace, begin, windows.end)
    outer = owner.number if owner is not None else -1
    common: list[Any] | None = None
    for op in [*role.readers, *(op for op in role.makers if op >= begin)]:
        number, inside = trace.ops[op].call, []
        while number > outer:
            inside.append(trace.calls[number].path)
            number = trace.calls[number].parent
        common = inside if common is None else [path for path in common if path in inside]
        if not common:
            return None
    if not common:
        return None
    path = common[0]
    for call in trace.calls:
        if call.path == path and any(value.number in role.members for _, value in call.args):
            return None
    return str(path)


def _loop_kind(trace: Trace, windows: Windows, roles: list[Role]) -> Kind:
    """Tell a layer (it takes a sequence, and returns one and its end state) from a loop."""
    owner = owner_of(trace, windows.starts[0], windows.end)
    if owner is None or owner.path == "":
        return "loop"
    given = any(windows.count in value.shape for _, value in owner.args)
    back = any(windows.count in value.shape for _, value in owner.results)
    ends = {role.values[-1].number for role in roles if role.values[-1] is not None}
    returned = ends & {value.number for _, value in owner.results}
    return "layer" if given and back and returned else "loop"


def first_step(windows: Windows, drafts: list[Draft]) -> int | None:
    """Return the operation at which a step before the loop begins; None if the code before the loop is not a step.

    It is a step if everything that leads to the loop's starts, apart from what the turns read too, is done in each turn
    with the same weights, and the turns read nothing else of it.
    """
    trace, begin = windows.trace, windows.starts[0]
    starts = [draft.initial for draft in drafts if draft.initial is not None]
    if [each.shape for each in starts] != [draft.values[0].shape for draft in drafts if draft.values[0] is not None]:
        return None
    turns = [value for turn in range(1, windows.count) for _, op in windows.of_turn(turn) for value in op.ins]
    shared = reaching(trace, (value for value in turns if value.op < begin), (0, begin))
    step = sorted(reaching(trace, starts, (0, begin)) - shared)
    made = {_kind(trace.ops[number]) for number in step if trace.ops[number].name not in MOVES}
    if not made <= {_kind(op) for _, op in windows.of_turn(1)} or not any(weights for _, weights in made):
        return None
    own = {value.number for value in starts}
    first = [value for _, op in windows.of_turn(0) for value in op.ins if step[0] <= value.op < begin]
    return step[0] if all(value.number in own for value in first) else None


def _kind(op: Op) -> tuple[str, frozenset[int]]:
    return op.name, frozenset(value.number for value in op.ins if value.origin == "parameter")
