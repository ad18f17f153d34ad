"""The front door: one real call of a model, and what recurs in it."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from .analysis import analyze
from .attributes import Attributes, kept_states
from .blind_spots import blind_spots
from .calls import ModelCall
from .candidates import Analysis, Candidate, Draft
from .cell_calls import no_cells
from .found import Found, Part, Recurrence, Unsure
from .nested_loops import merge
from .places import line_of
from .replay import Law
from .rows import Axes, axes_of


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
    `exclude` is left out. Shorter calls with other rows tell where the rows are.
    """
    model = _unwrapped(model)
    if isinstance(model, torch.jit.ScriptModule):
        return Found((), (Unsure("", "", "the model is scripted: its operations are not seen from Python"),))
    given = dict(kwargs or {})
    try:
        call = ModelCall(model, args, given, set(known))
    except Exception as error:  # a model that cannot be put back is not called
        return _failed(error)
    with _without_collector():
        return _find(call, tuple(exclude))


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


def _find(call: ModelCall, exclude: tuple[str, ...]) -> Found:
    with call.unharmed():
        kept = Attributes.before(call.model)
        try:
            trace = call.traced(call.inputs)
        except (MemoryError, torch.OutOfMemoryError) as error:
            return _failed(error)
        except Exception as error:
            return _failed_in_call(call, error)
        try:
            if trace.broken is not None:
                raise trace.broken
            analysis = analyze(trace)
            merge(analysis)
            _hold_to_the_law(analysis)
            kept.after(call.model, trace, analysis.marks)
        except Exception as error:  # our own mistake must not become the user's
            return _failed(error)
    try:
        return _found(call, analysis, kept, exclude)
    except Exception as error:
        return _failed(error)


def _failed_in_call(call: ModelCall, error: Exception) -> Found:
    """Raise what the model itself raises; what it raises only while it is watched is ours."""
    with call.unharmed():
        try:
            call.plain(call.inputs)
        except Exception:
            raise error from None
    return _failed(error)


def _found(call: ModelCall, analysis: Analysis, attributes: Attributes, exclude: tuple[str, ...]) -> Found:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        axes = axes_of(call, analysis)
        kept = kept_states(call, attributes, analysis)
    recurrences = []
    for candidate in analysis.candidates:
        if candidate.kind == "attribute" and not _has_rows(candidate, axes, analysis):
            continue
        recurrences.append(_recurrence(candidate, axes))
    recurrences += kept
    recurrences = [each for each in recurrences if not _excluded(each, exclude)]
    for where, why in (*analysis.trace.blind.items(), *blind_spots(analysis)):
        analysis.doubt(where, why)
    unsure, passed, known = tuple(analysis.unsure), tuple(analysis.passed), tuple(analysis.known)
    unseen, iterated, contradicted = tuple(_unseen(analysis)), tuple(analysis.iterated), tuple(no_cells(analysis))
    return Found(tuple(recurrences), unsure, passed, known, unseen, iterated, contradicted)


def _has_rows(candidate: Candidate, axes: Axes, analysis: Analysis) -> bool:
    """Keep of an attribute what has rows; what all rows share is a statistic."""
    where = (candidate.module, candidate.line)
    shared = [draft for draft in candidate.drafts if axes.shared(candidate, draft)]
    unknown = [
        draft
        for draft in candidate.drafts
        if draft not in shared and (axes.of(candidate, draft) is None or axes.mixed(candidate, draft))
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
        candidate.evidence.append(
            "repetitions run again from the parts alone give the same, from others something else"
        )
        if not candidate.drafts:
            analysis.candidates.remove(candidate)


def _recurrence(candidate: Candidate, axes: Axes) -> Recurrence:
    parts = tuple(_part(draft, axes.of(candidate, draft)) for draft in candidate.drafts)
    place = (candidate.module, candidate.line)
    return Recurrence(candidate.kind, *place, candidate.windows.count, parts, tuple(candidate.evidence))


def _part(draft: Draft, axis: int | None) -> Part:
    data = [value.data() for value in draft.values if value is not None]
    kept = tuple(each.detach().clone() for each in data if each is not None)
    start = draft.initial.data() if draft.initial is not None else None
    shape = tuple(kept[-1].shape) if kept else ()
    dtype = kept[-1].dtype if kept else torch.get_default_dtype()
    initial = None if start is None else start.detach().clone()
    return Part(draft.name, shape, dtype, axis, kept, initial, draft.argument, draft.result)


def _excluded(recurrence: Recurrence, exclude: tuple[str, ...]) -> bool:
    path = recurrence.module
    return any(path == each or path.startswith(f"{each}.") or recurrence.line == each for each in exclude)


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


def _unwrapped(model: nn.Module) -> nn.Module:
    while True:
        inner = model._modules.get("_orig_mod") if type(model).__name__ == "OptimizedModule" else None
        if isinstance(model, nn.parallel.DistributedDataParallel | nn.DataParallel):
            inner = model.module
        if not isinstance(inner, nn.Module):
            return model
        model = inner
