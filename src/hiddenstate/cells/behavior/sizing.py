"""Where each part has its rows: calls with other rows, stopped as soon as they tell."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from .analysis import analyze
from .calls import run
from .candidates import Analysis, Candidate, Draft
from .merging import merge
from .rows import axis_by_row, axis_by_size, batch_of, other_row, other_size
from .trace import Trace

_TURNS = 5  # repetitions of each loop that such a call makes


@dataclass(slots=True, eq=False, repr=False)
class Axes:
    """What calls with other rows told."""

    found: dict[tuple[str, str, str], int] = field(default_factory=dict)
    fixed: set[tuple[str, str, str]] = field(default_factory=set)  # of the same size whatever the number of rows

    def of(self, candidate: Candidate, draft: Draft) -> int | None:
        """Return the batch axis of a part."""
        return self.found.get(_key(candidate, draft))

    def shared(self, candidate: Candidate, draft: Draft) -> bool:
        """Say whether all rows are known to share a part."""
        return _key(candidate, draft) in self.fixed and _key(candidate, draft) not in self.found


def _key(candidate: Candidate, draft: Draft) -> tuple[str, str, str]:
    return candidate.module, candidate.line, draft.name


def axes_of(call: Any, analysis: Analysis) -> Axes:
    """Find the batch axis of every part of every candidate."""
    axes = Axes()
    if not analysis.candidates:
        return axes
    for axis in (0, 1):
        inputs = (call.args, call.kwargs)
        changed = other_size(inputs, axis)
        if changed is not None:
            (args, kwargs), rows, others = changed
            other = _again(call, args, kwargs, analysis)
            if other is not None:
                _by_size(axes, analysis, other, (rows, others))
        if not _missing(axes, analysis):
            break
        altered = other_row((call.args, call.kwargs), axis)
        other = _again(call, altered[0], altered[1], analysis) if altered is not None else None
        if other is not None:
            _by_row(axes, analysis, other, batch_of((call.args, call.kwargs), axis) or 0)
        if not _missing(axes, analysis):
            break
    return axes


def _missing(axes: Axes, analysis: Analysis) -> bool:
    """Say whether some part's rows are unknown; a part that kept its size while others followed the rows has none."""
    return any(
        axes.of(c, d) is None and not (axes.found and axes.shared(c, d)) for c in analysis.candidates for d in c.drafts
    )


def _again(call: Any, args: Any, kwargs: Any, analysis: Analysis) -> Analysis | None:
    """Make another call and analyze it; None where the model cannot be called so."""
    with call.snapshot.unharmed():
        try:
            trace, _ = run(call.model, args, kwargs, known=call.known, enough=_enough(analysis))
            if trace.broken is not None:
                return None
            other = analyze(trace)
            merge(other)
        except Exception:  # a trial with rows that the model may not take
            return None
        return other


def _enough(analysis: Analysis) -> Any:
    loops = [candidate.windows.scope for candidate in analysis.candidates if candidate.chain is None]
    codes = [scope.loop for scope in loops if scope is not None]
    modules = [candidate.chain.module for candidate in analysis.candidates if candidate.chain is not None]
    if len(set(codes)) < len(loops) or None in codes:
        return None  # the same loop runs several times: let it

    def enough(trace: Trace) -> bool:
        return all(trace.turned[code] > _TURNS for code in codes) and all(trace.called[m] > _TURNS for m in modules)

    return enough


def _pairs(one: Analysis, other: Analysis) -> Iterator[tuple[Candidate, Draft, Draft]]:
    """Yield the parts that stand at the same place in both calls: by name, else by order."""
    taken: Counter[tuple[str, str]] = Counter()
    for candidate in one.candidates:
        where = (candidate.module, candidate.line)
        same = [c for c in other.candidates if (c.module, c.line) == where]
        match = same[min(taken[where], len(same) - 1)] if same else None
        taken[where] += 1
        if match is None:
            continue
        names = {draft.name: draft for draft in match.drafts}
        for position, draft in enumerate(candidate.drafts):
            if draft.name in names:
                yield candidate, draft, names[draft.name]
            elif len(match.drafts) == len(candidate.drafts):
                yield candidate, draft, match.drafts[position]


def _by_size(axes: Axes, one: Analysis, other: Analysis, sizes: tuple[int, int]) -> None:
    for candidate, draft, match in _pairs(one, other):
        if candidate.kind == "cache":
            continue
        before, after = draft.values[0], match.values[0]
        if before is None or after is None:
            continue
        axis = axis_by_size(before.shape, after.shape, sizes)
        if axis is not None:
            axes.found.setdefault(_key(candidate, draft), axis)
        elif before.shape == after.shape:
            axes.fixed.add(_key(candidate, draft))


def _by_row(axes: Axes, one: Analysis, other: Analysis, rows: int) -> None:
    for candidate, draft, match in _pairs(one, other):
        pairs: list[tuple[Tensor, Tensor]] = []
        for before, after in zip(draft.values[:_TURNS], match.values[:_TURNS], strict=False):
            old = before.data() if before is not None else None
            new = after.data() if after is not None else None
            if old is not None and new is not None:
                pairs.append((old, new))
        axis = axis_by_row(pairs, rows)
        if axis is not None and candidate.kind != "cache":
            axes.found.setdefault(_key(candidate, draft), axis)
