"""Stepped cells: chains of calls of one module, turned into candidates."""

from __future__ import annotations

import inspect
import os
from collections import Counter, defaultdict
from collections.abc import Iterator
from typing import Any

from torch import nn

from ..signature import arguments
from .candidates import TOO_FEW, Analysis, Candidate, Draft, how, pieces_of, problem_of
from .chains import Chain, Link, chains_of
from .crossings import Role
from .found import Unsure
from .memory import Value
from .names import Namer
from .operation import ModuleCall
from .places import Scope
from .repetition import Windows
from .trace import Trace


def take_chains(analysis: Analysis, roles: dict[Scope, list[Role]]) -> None:
    """Add modules that are given their own earlier results; of nested modules, the innermost."""
    trace = analysis.trace
    made: list[tuple[Chain, Candidate]] = []
    iterations: list[Candidate] = []
    analysis.chains = chains_of(trace)
    for chain in analysis.chains:
        where = (chain.path, _call_line(chain))
        if chain.known:
            candidate = _iterated(analysis, chain, roles)
            why = f"called {len(chain.calls)} times, handed what it gave before"
            if candidate is not None:
                why += "; no call takes anything of the input of its own: an iteration, which nobody should carry"
                iterations.append(candidate)
            analysis.known[Unsure(*where, why)] = None
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
    analysis.candidates += iterations
    calls = Counter(call.module for call in trace.calls if call.known)
    for one in iterations:
        assert one.chain is not None
        calls.subtract({one.chain.module: len(one.chain.calls)})
    # If it is also called in another way, it may be stepped along time there.
    analysis.iterated = dict.fromkeys(one.module for one in iterations if one.chain and not calls[one.chain.module])


def no_cells(analysis: Analysis) -> Iterator[Unsure]:
    """Yield modules whose second argument is not used as a cell uses its state."""
    calls: dict[nn.Module, list[ModuleCall]] = defaultdict(list)
    for call in analysis.trace.calls:
        calls[call.module].append(call)
    for module, own in calls.items():
        names = arguments(type(module))
        places = [("args", 1), ("kwargs", names[1])] if len(names) > 1 else []
        given = [{value.number: value for place, value in call.args if place[:2] in places} for call in own]
        if not places or not all(given) or len(own) > 1:  # it is stepped, so it is a cell, if perhaps a faulty one
            continue
        where = (own[0].path, f"{os.path.basename(own[0].site[0])}:{own[0].site[1]}" if own[0].path else "")
        if all(held.keys() <= {v.number for _, v in call.results} for held, call in zip(given, own, strict=True)):
            yield Unsure(*where, f"{names[1]} comes back as it went in: no step makes a new state of it")
        elif own[0].path and all(v.op >= 0 and analysis.marks[n] for n, v in given[0].items()):
            why = f"called once, with something made of the input as {names[1]}: nothing it gave was handed back"
            yield Unsure(*where, why)


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
    """Return the calls of a module as repetitions, each with the operations since the one before."""
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
    crossing = {v.number for place in chain.parts for v in chain.values(place) if v is not None} | chain.on_the_way
    problem = problem_of(windows, crossing, pieces.strange)
    if problem:
        analysis.doubt(where, problem)
        analysis.covered |= chain.on_the_way
        return None
    loop, drafts = _chain_drafts(
        trace, chain, {one: found for one, found in roles.items() if one not in analysis.incomplete}
    )
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
    evidence.append(how(own))
    return Candidate("cell" if own else "iteration", *where, windows, drafts, evidence, chain)


def _iterated(analysis: Analysis, chain: Chain, roles: dict[Scope, list[Role]]) -> Candidate | None:
    """Return the calls of a known module as an iteration, if they take no piece of the call's input."""
    windows = chain_windows(analysis.trace, chain)
    results = [[dict(call.results).get(links[-1].result) for links in chain.parts.values()] for call in chain.calls]
    targets = [[value for value in each if value is not None] for each in results]
    moving = any(analysis.moves[value.number] for each in targets for value in each)
    taken = [[value.shape for place, value in call.args if place not in chain.parts] for call in chain.calls]
    if any(shapes != taken[-1] for shapes in taken):
        return None  # one of them reads more than the others: a beginning in time
    if len(chain.calls) < 3 or not moving or pieces_of(windows, targets, analysis.marks).own:
        return None
    loop, drafts = _chain_drafts(analysis.trace, chain, roles)
    shapes = {value.shape for draft in drafts[:1] for value in draft.values if value is not None}
    if loop in analysis.timed or len(shapes) > 1:
        return None
    evidence = [f"known by type, and called {len(chain.calls)} times, each time handed what it gave before", how(False)]
    return Candidate("iteration", chain.path, _call_line(chain), windows, drafts, evidence, chain)


def _is_of(role: Role, drafts: list[Draft]) -> bool:
    own = {value.number for draft in drafts for value in draft.values if value is not None}
    return any(value is not None and value.number in own for value in role.values)


def _pairs(drafts: list[Draft]) -> str:
    return ", ".join(f"{_readable(d.argument)} from result{_readable(d.result, '')}" for d in drafts)


def _readable(place: tuple[Any, ...] | None, first: str = "argument ") -> str:
    if not place:
        return ""
    rest = place[1:] if place[0] in ("args", "kwargs") and first else place
    return first + "".join(f"[{step!r}]" for step in rest)


def _chain_drafts(trace: Trace, chain: Chain, roles: dict[Scope, list[Role]]) -> tuple[Scope | None, list[Draft]]:
    begin, end = chain.calls[0].start, chain.calls[-1].end
    around = [loop for loop in roles if loop.start <= begin and loop.end >= end and len(loop.turns) >= len(chain.calls)]
    loop = max(around, key=lambda scope: scope.start, default=None)
    namer = Namer.of(trace, loop)
    drafts = []
    for place, links in chain.parts.items():
        values = chain.values(place)
        role = _role_with(roles[loop], links, values) if loop is not None else None
        start = chain.initial(place)
        if role is not None:
            # The value that crosses the turns of the loop is the state, even if the call gets it masked.
            values = role.values
            start = role.initial if role.initial is not None else start
        name = namer.name(values, _argument_name(chain.module, place), _inner_name(trace, chain, place))
        drafts.append(Draft(name, values, start, place, links[-1].result))
    return loop, drafts


def _inner_name(trace: Trace, chain: Chain, place: tuple[Any, ...]) -> str:
    """Return the name of a part in the module's own code; outside, it may only be a place in a tuple."""
    names = trace.names_inside.get(chain.module, {})
    found = [names.get(id(value.tensor)) for call in chain.calls[1:3] for where, value in call.args if where == place]
    return next((name for name in found if name), "")


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
        except (TypeError, ValueError, AttributeError):  # a forward that is not written in Python
            name = f"state{first}"
    if rest and isinstance(rest[-1], str):
        return rest[-1]
    return name + "".join(f"[{step}]" for step in rest)
