"""From a trace to what recurs in it: chains of module calls first, then what else crosses in loops."""

from __future__ import annotations

import inspect
import os
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from .chains import Chain, Link, chains_of
from .deciding import Namer, collects, escape_of, grows_by_joining, line_of, owner_of, pieces_of
from .found import Kind, Unsure
from .memory import Value
from .operations import MOVES
from .places import Scope
from .repetition import Role, Windows, from_input, roles_of, windows_of
from .trace import Trace

_RUNS = 32  # runs of one loop after which further ones are not looked at, if none was in time
TOO_FEW = "only two repetitions: call the model with three or more to decide"


@dataclass(slots=True, eq=False, repr=False)
class Draft:
    """A part in the making."""

    name: str
    values: list[Value | None]
    initial: Value | None
    argument: tuple[Any, ...] | None = None
    result: tuple[Any, ...] | None = None


@dataclass(slots=True, eq=False, repr=False)
class Candidate:
    """A recurrence in the making."""

    kind: Kind
    module: str
    line: str
    windows: Windows
    drafts: list[Draft]
    evidence: list[str]
    chain: Chain | None = None

    @property
    def numbers(self) -> set[int]:
        """All values that it carries."""
        own = {value.number for draft in self.drafts for value in (*draft.values, draft.initial) if value is not None}
        return own | (self.chain.on_the_way if self.chain is not None else set())

    @property
    def span(self) -> tuple[int, int]:
        """Its operations, from and to."""
        return self.windows.starts[0], self.windows.end


@dataclass(slots=True, eq=False, repr=False)
class Analysis:
    """All that one trace tells."""

    trace: Trace
    marks: bytearray  # by value: it depends on the call's input
    moves: bytearray  # by value: it depends on the call's input, or on random draws
    candidates: list[Candidate] = field(default_factory=list)
    unsure: dict[Unsure, None] = field(default_factory=dict)
    passed: dict[Unsure, None] = field(default_factory=dict)
    known: dict[Unsure, None] = field(default_factory=dict)
    covered: set[int] = field(default_factory=set)  # values that chains account for
    timed: set[Scope] = field(default_factory=set)  # loops that take the call's input piece by piece

    def doubt(self, where: tuple[str, str], why: str) -> None:
        """Name something that could not be decided."""
        self.unsure[Unsure(*where, why)] = None

    def leave(self, where: tuple[str, str], why: str) -> None:
        """Name something that is certainly no recurrence."""
        self.passed[Unsure(*where, why)] = None


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
        roles[loop] = roles_of(windows[loop])
        before.append(_in_time(analysis, windows[loop], roles[loop]))
        if before[-1]:
            analysis.timed.add(loop)
    loops = list(windows)
    _take_chains(analysis, roles)
    for loop in loops:
        if roles[loop]:
            _take_loop(analysis, loop, windows[loop], roles[loop])
    return analysis


def _in_time(analysis: Analysis, windows: Windows, roles: list[Role]) -> bool:
    """Say whether a loop as a whole takes the call's input piece by piece, on the way to anything that crosses."""
    roles = [role for role in roles if not role.grows and not collects(windows, role, roles)]
    if not roles:
        return False
    targets = [[v for role in roles if (v := role.values[turn]) is not None] for turn in range(windows.count)]
    return pieces_of(windows, targets, analysis.marks).own


def _take_chains(analysis: Analysis, roles: dict[Scope, list[Role]]) -> None:
    trace = analysis.trace
    made: list[tuple[Chain, Candidate]] = []
    for chain in chains_of(trace):
        where = (chain.path, _call_line(chain))
        if chain.known:
            analysis.known[Unsure(*where, f"called {len(chain.calls)} times, handed what it gave before")] = None
            analysis.covered |= chain.on_the_way
            continue
        candidate = _of_chain(analysis, chain, roles)
        if candidate is not None:
            made.append((chain, candidate))
    for chain, candidate in made:
        inside = [other for other in made if other[0] is not chain and _within(other[0], chain)]
        outside = [other for other in made if other[0] is not chain and _within(chain, other[0])]
        if candidate.kind == "iteration" and any(other.kind == "cell" for _, other in outside):
            analysis.leave((candidate.module, candidate.line), "repeats within each step of a cell")
            continue
        finer = set().union(*(c.on_the_way for c, o in inside if o.kind == "cell" or candidate.kind == "iteration"))
        finer |= analysis.covered if any(call.known for call in trace.calls) else set()
        candidate.drafts = [draft for draft in candidate.drafts if not _carried(draft, finer)]
        if candidate.drafts:
            analysis.candidates.append(candidate)
    for chain, _ in made:
        analysis.covered |= chain.on_the_way


def _carried(draft: Draft, finer: set[int]) -> bool:
    values = [value for value in draft.values[:-1] if value is not None]
    return bool(values) and all(value.number in finer for value in values)


def _within(inner: Chain, outer: Chain) -> bool:
    first = inner.calls[0]
    return any(c.start <= first.start and first.end <= c.end and c.number < first.number for c in outer.calls)


def _call_line(chain: Chain) -> str:
    file, line = chain.calls[1].site
    return f"{os.path.basename(file)}:{line}"


def chain_windows(trace: Trace, chain: Chain) -> Windows:
    """Return the calls of a module as repetitions, each with what was prepared for it since the one before."""
    starts = [chain.calls[0].start, *(call.end for call in chain.calls[:-1])]
    return Windows(trace, starts, chain.calls[-1].end)


def _of_chain(analysis: Analysis, chain: Chain, roles: dict[Scope, list[Role]]) -> Candidate | None:
    trace, where = analysis.trace, (chain.path, _call_line(chain))
    windows = chain_windows(trace, chain)
    results = [[dict(call.results).get(links[-1].result) for links in chain.parts.values()] for call in chain.calls]
    targets = [[value for value in each if value is not None] for each in results]
    pieces = pieces_of(windows, targets, analysis.marks)
    if not any(analysis.moves[value.number] for each in targets for value in each):
        analysis.leave(where, "what crosses does not depend on the call's input")
        return None
    if len(chain.calls) < 3:
        if pieces.own:
            analysis.doubt(where, TOO_FEW)
        analysis.covered |= chain.on_the_way
        return None
    crossing = {value.number for place in chain.parts for value in chain.values(place)} | chain.on_the_way
    problem = _problem(windows, crossing, pieces.strange)
    if problem:
        analysis.doubt(where, problem)
        analysis.covered |= chain.on_the_way
        return None
    loop, drafts = _chain_drafts(trace, chain, roles)
    if loop is not None:
        chain.on_the_way.update(*(role.members for role in roles[loop] if _is_of(role, drafts)))
    shapes = [{value.shape for value in draft.values if value is not None} for draft in drafts]
    if any(len(each) > 1 for each in shapes):
        if all(len({len(shape) for shape in each}) == 1 for each in shapes) and not pieces.own:
            analysis.leave(where, "what crosses changes its size from call to call")
        else:
            analysis.doubt(where, "what crosses changes its size from call to call")
        analysis.covered |= chain.on_the_way
        return None
    evidence = [f"called {len(chain.calls)} times, each time handed what it gave before ({_pairs(drafts)})"]
    own = pieces.own or loop in analysis.timed
    evidence.append(_how(own))
    return Candidate("cell" if own else "iteration", *where, windows, drafts, evidence, chain)


def _is_of(role: Role, drafts: list[Draft]) -> bool:
    own = {value.number for draft in drafts for value in draft.values if value is not None}
    return any(value is not None and value.number in own for value in role.values)


def _how(own: bool) -> str:
    if own:
        return "each repetition takes its own piece of the call's input: time"
    return "no repetition takes a piece of the call's input of its own: an iteration, not time"


def _pairs(drafts: list[Draft]) -> str:
    return ", ".join(f"{_readable(d.argument)} from result{_readable(d.result, '')}" for d in drafts)


def _readable(place: tuple[Any, ...] | None, first: str = "argument ") -> str:
    if not place:
        return ""
    rest = place[1:] if place[0] in ("args", "kwargs") and first else place
    return first + "".join(f"[{step!r}]" for step in rest)


def _problem(windows: Windows, crossing: set[int], strange: str) -> str:
    escape = escape_of(windows, crossing)
    if escape is not None:
        file, line = escape.where.rsplit(":", 1)
        place = f"{os.path.basename(file)}:{line}"
        return f"a number that depends on the state leaves for Python ({escape.name} at {place}): it may steer the loop"
    if strange:
        return f"an operand of {strange} changes from repetition to repetition, and its origin was not seen"
    return ""


def _chain_drafts(trace: Trace, chain: Chain, roles: dict[Scope, list[Role]]) -> tuple[Scope | None, list[Draft]]:
    begin, end = chain.calls[0].start, chain.calls[-1].end
    around = [loop for loop in roles if loop.start <= begin and loop.end >= end and len(loop.turns) >= len(chain.calls)]
    loop = max(around, key=lambda scope: scope.start, default=None)
    namer = Namer.of(trace, loop)
    drafts = []
    for place, links in chain.parts.items():
        values: list[Value | None] = [*chain.values(place)]
        role = _role_with(roles[loop], links, values) if loop is not None else None
        start = chain.initial(place)
        if role is not None:
            # What crosses the turns of the loop is the state, also where the call is handed it masked.
            values = role.values
            start = role.initial if role.initial is not None else start
        name = namer.name(values, _argument_name(chain.module, place))
        drafts.append(Draft(name, values, start, place, links[-1].result))
    return loop, drafts


def _role_with(roles: list[Role], links: list[Link], values: list[Value | None]) -> Role | None:
    way = set().union(*(link.path for link in links))
    shape = values[-1].shape if values[-1] is not None else None
    for role in roles:
        crossing = [value for value in role.values[:-1] if value is not None]
        inside = sum(value.number in way for value in crossing)
        fits = all(value is not None and value.shape == shape for value in role.values)
        if fits and len(role.values) == len(values) and inside >= max(2, 0.8 * len(crossing)):
            return role
    return None


def _argument_name(module: nn.Module, place: tuple[Any, ...]) -> str:
    kind, first, *rest = place
    name = str(first)
    if kind == "args":
        try:
            names = [p.name for p in inspect.signature(type(module).forward).parameters.values()][1:]
            name = names[first] if first < len(names) else name
        except (TypeError, ValueError):
            name = f"state{first}"
    if rest and isinstance(rest[-1], str):
        return rest[-1]
    return name + "".join(f"[{step}]" for step in rest)


def _take_loop(analysis: Analysis, loop: Scope, windows: Windows, roles: list[Role]) -> None:
    trace = analysis.trace
    owner = owner_of(trace, windows.starts[0], windows.end)
    where = (owner.path if owner is not None else "", line_of(loop))
    roles = [role for role in roles if role.grows or not _accounted(analysis, role)]
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
    """Say whether all that is made in the loop is made with weights that change from turn to turn."""
    turns = range(windows.count)
    made = [[v for _, op in windows.of_turn(turn) for v in op.outs] for turn in turns]
    return pieces_of(windows, made, analysis.marks).depth


def _accounted(analysis: Analysis, role: Role) -> bool:
    """Say whether a module's chain carries this already, as it is or in a larger tensor."""
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
    pieces = pieces_of(windows, targets, analysis.marks, _states_around(analysis, windows))
    if pieces.depth:
        analysis.leave(where, "each repetition has weights of its own: layers in depth, not time")
        return
    crossing = {number for role in roles for number in role.members}
    problem = _problem(windows, crossing, pieces.strange)
    if problem:
        analysis.doubt(where, problem)
        return
    changing = any(len({v.shape for v in role.values if v is not None}) > 1 for role in roles)
    if windows.count < 3:
        if pieces.own and not changing:
            analysis.doubt(where, TOO_FEW)
        else:
            analysis.leave(
                where, "only two repetitions, and what crosses changes its size or takes nothing of the input"
            )
        return
    if changing:
        if pieces.weights or pieces.own:
            analysis.doubt(where, "what crosses changes its size from repetition to repetition")
        else:
            analysis.leave(where, "what crosses changes its size from repetition to repetition")
        return
    for kind, place, group in _grouped(analysis, loop, windows, roles, where):
        namer = Namer.of(analysis.trace, loop)
        drafts = [Draft(namer.name(r.values, f"state{i}"), r.values, r.initial) for i, r in enumerate(group)]
        names = ", ".join(draft.name for draft in drafts)
        evidence = [f"{names} cross{'es' if len(drafts) == 1 else ''} {windows.count - 1} times", _how(pieces.own)]
        final: Kind = kind if pieces.own else "iteration"
        analysis.candidates.append(Candidate(final, place, where[1], windows, drafts, evidence))


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
    """Part what modules keep in attributes, one group for each module, from what the loop itself keeps."""
    kept: dict[str, list[Role]] = {}
    own: list[Role] = []
    for role in roles:
        module = _keeper(analysis.trace, windows, role)
        if module is None:
            own.append(role)
        else:
            kept.setdefault(module, []).append(role)
    for module, group in kept.items():
        yield "attribute", module, group
    if own:
        yield _loop_kind(analysis.trace, windows, own), where[0], own


def _keeper(trace: Trace, windows: Windows, role: Role) -> str | None:
    """Return the module, called in every turn, within whose calls a value is both made and read."""
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
    """Tell a layer, which takes a sequence and gives back one and the state it ends in, from a loop."""
    owner = owner_of(trace, windows.starts[0], windows.end)
    if owner is None or owner.path == "":
        return "loop"
    given = any(windows.count in value.shape for _, value in owner.args)
    back = any(windows.count in value.shape for _, value in owner.results)
    ends = {role.values[-1].number for role in roles if role.values[-1] is not None}
    returned = ends & {value.number for _, value in owner.results}
    return "layer" if given and back and returned else "loop"
