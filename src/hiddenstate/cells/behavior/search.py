"""The front door: one real call of a model, and what recurs in it."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from ...errors import BadInput
from ...state import mapped, tensors
from ..dynamo import eager
from ..listener import unheard
from ..snapshot import untouched
from ..wrappers import unwrap_to_call
from .analysis import analyze
from .attributes import Attributes, kept_states
from .blind_spots import blind_spots, undecided
from .candidates import Analysis, Candidate, Draft
from .found import Found, Part, Recurrence, Unsure
from .handed_back import entangled
from .mixing import mixing
from .model_call import ModelCall, label_of
from .operation import leaves
from .order import cuts_of
from .overriding import overriding_now
from .places import line_of
from .replay import Law
from .rows import Axes, axes_of
from .starts import first_states, handed_in, start_of
from .stepped_cells import no_cells
from .taps import LoopTaps, Tapped, plan_of
from .trace import Trace


def find(
    model: nn.Module,
    args: tuple[Any, ...] = (),
    kwargs: dict[str, Any] | None = None,
    *,
    exclude: Iterable[str] = (),
    known: Iterable[nn.Module] = (),
) -> Found:
    """Call `model` under a trace and return what recurs in it; the model comes back as it was.

    Modules that are `known` as recurrent by their type count as one operation each. What is inside the paths of
    `exclude` is left out. Where the call does not tell where the rows are, shorter ones with other rows do.
    """
    model = unwrap_to_call(model)
    if isinstance(model, torch.jit.ScriptModule):
        return _SCRIPTED
    call = ModelCall(model, (args, dict(kwargs or {})), set(known), again=model)
    with _without_collector(), unheard():
        try:
            with call.unharmed():
                looked = _traced(call)
        except BadInput as error:  # a model that cannot be put back is not called
            return _failed(error)
        if isinstance(looked, Found):
            return looked
        _, analysis, kept = looked
        others = partial(_without_cells, call, analysis.trace, kept)
        return replace(_found(*looked, tuple(exclude)), without_cells=others)


def find_in(
    model: nn.Module,
    inputs: tuple[tuple[Any, ...], dict[str, Any]],
    run: Callable[[], Any],
    *,
    known: Iterable[nn.Module] = (),
    before: Found | None = None,
) -> tuple[Any, Found]:
    """Let a call of `model` that somebody makes go on by `run`, and return what it gives and what recurs in it.

    `before` is what was found in an earlier call: what it told of rows holds.
    """
    if isinstance(model, torch.jit.ScriptModule):
        return run(), _SCRIPTED
    plan = before.plan if before is not None else None
    known = set(known)
    taps = None if plan is None else LoopTaps(plan.sites, known)
    if plan is not None and plan.runs and taps is not None and before is not None:
        taps.overriding = overriding_now()
        # What is put in the place of a start is not seen by compiled code.
        with eager() if taps.overriding is not None else nullcontext():
            result = taps.around(run)
        return result, _read(before, plan.read(taps, inputs))
    call = ModelCall(model, inputs, known, again=lambda *args, **kwargs: model.forward(*args, **kwargs))
    kept = Attributes.before(model)
    with _without_collector():
        trace, result = call.real(run, taps)
        cells = before is None or before.cells
        found, candidates = _found_in(call, trace, kept, before, cells=cells)
        new = plan_of(trace, candidates, inputs)
        if new is not None and cells and any(isinstance(site[0], nn.Module) for site in new.sites):
            new = None  # what known cells make is heard from them, and what is chosen by it may go another way
        if plan is not None and taps is not None:
            new = plan.proven(new, taps, candidates)
    steady = before is None or before.steady  # what a call did otherwise once is not tapped again, and so never lost
    others = partial(_without_cells, call, trace, kept) if before is None else None
    return result, replace(found, plan=new if steady else None, steady=steady, without_cells=others)


def _found_in(
    call: ModelCall, trace: Trace, kept: Attributes, before: Found | None, *, cells: bool
) -> tuple[Found, list[Candidate]]:
    """Return what recurs in a call that somebody has made, with the candidates that it is made of."""
    with untouched(call.model), unheard():
        looked = _analyzed(call, trace, kept, later=before is not None, cells=cells)
        if isinstance(looked, Found):
            return looked, []
        return replace(_found(*looked, (), before, live=True), cells=cells), looked[1].candidates


def _without_cells(call: ModelCall, trace: Trace, kept: Attributes) -> Found:
    with _without_collector():
        found, candidates = _found_in(call, trace, kept, None, cells=False)
        return replace(found, plan=plan_of(trace, candidates, call.inputs))


def _read(before: Found, made: list[tuple[Tapped, list[Tensor], Tensor | None]] | None) -> Found:
    """Return what was seen before with what a tapped call made; where that took another way, say so."""
    if made is None:
        return replace(before, live={}, plan=None, steady=False, unsure=(*before.unsure, Unsure("", "", _ANOTHER_WAY)))
    recurrences, live, left = [], {}, list(made)
    for each in before.recurrences:
        own: dict[str, tuple[list[Tensor], Tensor | None]] = {}
        for entry in left.copy():  # a module that is called twice has its loop twice, in this order
            tapped, values, start = entry
            if (tapped.module, tapped.line) == (each.module, each.line) and tapped.name not in own:
                own[tapped.name] = values, start
                left = [other for other in left if other is not entry]
        if own:
            parts = tuple(replace(p, initial=own[p.name][1]) if p.name in own else p for p in each.parts)
            each = replace(each, parts=parts, steps=len(next(iter(own.values()))[0]))
            live[each] = {name: values for name, (values, _) in own.items()}
        recurrences.append(each)
    return replace(before, recurrences=tuple(recurrences), live=live)


_ANOTHER_WAY = "a later call took another way through its loops than those before: what it made in them was not seen"
_SCRIPTED = Found((), (Unsure("", "", "the model is scripted: its operations are not seen from Python"),))


@contextmanager
def _without_collector() -> Iterator[None]:
    """Hold the garbage collector off: a trace is many small objects that all stay, and it would walk them each time."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


_Looked: TypeAlias = "tuple[ModelCall, Analysis, Attributes]"


def _traced(call: ModelCall) -> _Looked | Found:
    kept = Attributes.before(call.model)
    try:
        trace = call.traced(call.inputs)
    except (MemoryError, torch.OutOfMemoryError) as error:
        return _failed(error)
    except Exception as error:
        return _failed_in_call(call, error)
    return _analyzed(call, trace, kept)


def _analyzed(
    call: ModelCall, trace: Trace, kept: Attributes, *, later: bool = False, cells: bool = True
) -> _Looked | Found:
    try:
        if trace.broken is not None:
            raise trace.broken
        analysis = analyze(trace, cells=cells)
        if trace.replayable:
            _hold_to_the_law(analysis)
        kept.after(call.model, trace, analysis.marks)
        analysis.cuts = None if later else cuts_of(analysis)
    except Exception as error:  # our own mistake must not become the user's
        return _failed(error)
    return call, analysis, kept


def _failed_in_call(call: ModelCall, error: Exception) -> Found:
    """Raise what the model itself raises; what it raises only while it is watched is ours."""
    with call.unharmed():
        try:
            call.plain(call.inputs)
        except Exception:
            raise error from None
    return _failed(error)


def _found(
    call: ModelCall,
    analysis: Analysis,
    attributes: Attributes,
    exclude: tuple[str, ...],
    before: Found | None = None,
    *,
    live: bool = False,
) -> Found:
    """Make what is handed out of an analysis: recurrences with their rows, and all that is said beside them."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            axes = axes_of(call, analysis, before)
            kept = kept_states(call, attributes, analysis, before)
        recurrences, alive, starts = [], {}, {}
        for candidate in analysis.candidates:
            if candidate.kind == "attribute" and not _has_rows(candidate, axes, analysis):
                continue
            made = _recurrence(candidate, axes, live)
            if not _excluded(made, exclude):
                recurrences.append(made)
                alive[made] = _alive(candidate) if live else {}
                starts[made] = start_of(analysis.trace, candidate)
        recurrences += [each for each in kept if not _excluded(each, exclude)]
        for where, why in (*analysis.trace.blind.items(), *blind_spots(analysis)):
            analysis.doubt(where, why)
    except Exception as error:  # our own mistake must not become the user's
        return _failed(error)
    return Found(
        recurrences=tuple(recurrences),
        unsure=tuple(analysis.unsure),
        passed=tuple(analysis.passed),
        known=tuple(analysis.known),
        unseen=tuple(_unseen(analysis)),
        iterated=tuple(analysis.iterated),
        contradicted=tuple(no_cells(analysis)),
        cuts=analysis.cuts.beside(recurrences) if analysis.cuts is not None else (),
        live=alive,
        starts=starts,
        handed_in=handed_in(analysis),
        made_of_input=frozenset(path for path, value in first_states(analysis) if analysis.marks[value.number]),
        times=_times(call, analysis),
        called=frozenset(call.module for call in analysis.trace.calls),
        later=tuple(analysis.later),
        maybe=tuple(analysis.maybe),
        going_on=tuple(analysis.going_on),
        cleared=frozenset(analysis.cleared),
        rerun=frozenset(attributes.rerun),
        examined=frozenset(_examined(analysis)),
        short=tuple(undecided(analysis)),
        entangled=tuple(dict.fromkeys(entangled(analysis))),
        mixing=partial(mixing, call.model, analysis) if live else None,
    )


def _times(call: ModelCall, analysis: Analysis) -> tuple[tuple[tuple[Any, ...], int], ...]:
    """Return which arguments of the call are read step by step, and along which axis."""
    axes = dict(analysis.cuts.times) if analysis.cuts is not None else {}
    return tuple((place, axes[label]) for place, _ in leaves(call.inputs) if (label := label_of(place)) in axes)


def _has_rows(candidate: Candidate, axes: Axes, analysis: Analysis) -> bool:
    """Keep of an attribute what has rows; what all rows share is a statistic."""
    where = (candidate.module, candidate.line)
    shared = [draft for draft in candidate.drafts if axes.shared(candidate, draft)]
    unknown = [
        draft
        for draft in candidate.drafts
        if draft not in shared
        and (axes.of(candidate, draft) is None or axes.mixed(candidate, draft) or axes.by_number(candidate, draft))
    ]
    for draft in shared:
        analysis.leave(where, f"{draft.name} is shared by all rows: a statistic, not a state")
    for draft in unknown:
        analysis.doubt(where, f"{draft.name} is kept by the module, but whether it has a row for each row is unknown")
    candidate.drafts = [draft for draft in candidate.drafts if draft not in shared and draft not in unknown]
    return bool(candidate.drafts)


def _hold_to_the_law(analysis: Analysis) -> None:
    """Keep only what can be replayed from its parts alone, and of these what matters."""
    for candidate in list(analysis.candidates):
        if candidate.kind == "cache":
            continue
        where, law = (candidate.module, candidate.line), Law(analysis, candidate)
        reason = law.broken()
        if reason:
            analysis.doubt(where, reason)
            analysis.candidates.remove(candidate)
            continue
        for draft in law.idle():
            analysis.leave(where, f"{draft.name} crosses, but whatever it holds, nothing else comes out")
            candidate.drafts.remove(draft)
        for draft in [each for each in candidate.drafts if _collects(candidate, each)]:
            analysis.leave(where, f"{draft.name} is an output that every turn writes its own step into")
            candidate.drafts.remove(draft)
        candidate.evidence.append(
            "repetitions run again from the parts alone give the same, from others something else"
        )
        if not candidate.drafts:
            analysis.candidates.remove(candidate)


def _collects(candidate: Candidate, draft: Draft) -> bool:
    """Say whether a part is only written, a step in every turn, and read by nothing else in the loop."""
    trace = candidate.windows.trace
    made = [value.op for value in draft.values if value is not None and value.op >= 0]
    if not made or any(trace.ops[number].name not in _SCATTERS for number in made):
        return False
    own = {value.number for value in draft.values if value is not None}
    begin, end = candidate.span
    reads = (number for number in range(begin, end) if any(value.number in own for value in trace.ops[number].ins))
    return all(number in made for number in reads)


_SCATTERS = {"index_copy", "select_scatter", "slice_scatter", "scatter", "index_put", "masked_scatter"}


def _recurrence(candidate: Candidate, axes: Axes, live: bool) -> Recurrence:
    parts = tuple(
        replace(_part(draft, axes.of(candidate, draft), live), counted=axes.by_number(candidate, draft))
        for draft in candidate.drafts
    )
    returned, hidden = None, False
    if candidate.kind == "cell" and candidate.chain is not None:
        last = candidate.chain.calls[-1]
        returned = mapped(last.returned, lambda _, end: torch.empty(0) if isinstance(end, Tensor) else end)
        hidden = any(part.argument not in tensors(last.given) for part in parts)
    return Recurrence(
        kind=candidate.kind,
        module=candidate.module,
        line=candidate.line,
        steps=candidate.windows.count,
        parts=parts,
        evidence=tuple(candidate.evidence),
        returned=returned,
        hidden=hidden,
    )


def _part(draft: Draft, axis: int | None, live: bool) -> Part:
    data = [each for value in draft.values if value is not None and (each := value.data()) is not None]
    kept = () if live else tuple(each.detach().clone() for each in data)
    start = draft.initial.data() if draft.initial is not None else None
    shape, dtype = (tuple(data[-1].shape), data[-1].dtype) if data else ((), torch.get_default_dtype())
    initial = None if start is None else start.detach().clone()
    return Part(draft.name, shape, dtype, axis, kept, initial, draft.argument, draft.result)


def _alive(candidate: Candidate) -> dict[str, list[Tensor]]:
    """Return what each part was after every repetition, with its graph; of a cell, what its calls returned."""
    found: dict[str, list[Tensor]] = {}
    for draft in candidate.drafts:
        values = draft.values
        if candidate.kind == "cell" and candidate.chain is not None and draft.result is not None:
            values = [dict(call.results).get(draft.result) for call in candidate.chain.calls]
        found[draft.name] = [tensor for value in values if value is not None and (tensor := value.alive()) is not None]
    return found


def _excluded(recurrence: Recurrence, exclude: tuple[str, ...]) -> bool:
    path = recurrence.module
    return any(path == each or path.startswith(f"{each}.") or recurrence.line == each for each in exclude)


def _examined(analysis: Analysis) -> Iterator[str]:
    """Yield the lines of loops with three turns and more."""
    yield from (line_of(loop) for loop in analysis.trace.places.scopes if loop.kind == "loop" and len(loop.turns) > 2)


def _unseen(analysis: Analysis) -> list[str]:
    """Name loops that ran only once, whichever way: they may be recurrent, and one turn cannot tell."""
    most: dict[str, int] = {}
    for scope in analysis.trace.places.scopes:
        if scope.kind == "loop" and not scope.code.co_filename.startswith(_TORCH):
            line = line_of(scope)
            most[line] = max(most.get(line, 0), len(scope.turns))
    return [f"{line}: a loop that ran once; three or more steps would tell" for line, n in most.items() if n == 1]


_TORCH = torch.__path__[0]


def _failed(error: Exception) -> Found:
    why = f"the analysis of this call failed ({type(error).__name__}: {str(error)[:120]}): nothing is claimed"
    return Found((), (Unsure("", "", why),))
