"""Where each part has its rows: read from the call itself, run again with another input in one row.

Where that does not tell (rows reach each other, say), calls of the model with other rows do, which are stopped as soon
as they tell; beside a call that the user makes, there are none.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch import Tensor

from ...state import mapped, tensors
from .analysis import analyze
from .candidates import Analysis, Candidate, Draft
from .found import Found
from .memory import Value
from .model_call import ModelCall
from .operation import leaves
from .repetition import reached, reaching
from .replay import run_again
from .trace import Trace

_TURNS = 5  # repetitions of each loop that tell

_Pairs: TypeAlias = "list[tuple[Tensor | None, Tensor | None]]"  # what a part was, and what it would have been


@dataclass(slots=True, eq=False, repr=False)
class Axes:
    """What calls with other rows told of the parts of recurrences."""

    sized: dict[tuple[str, str, str], int] = field(default_factory=dict)  # the axis that followed the number of rows
    reached: dict[tuple[str, str, str], int] = field(default_factory=dict)  # along which one row's input reached one
    tested: set[tuple[str, str, str]] = field(
        default_factory=set
    )  # sized, and compared after something else in one row
    fixed: set[tuple[str, str, str]] = field(default_factory=set)  # of the same size whatever the number of rows
    along: int = 0  # the axis of the call's input along which its rows lie
    counted: dict[tuple[str, str, str], int] = field(default_factory=dict)  # the only axis as long as the rows are many

    def of(self, candidate: Candidate, draft: Draft) -> int | None:
        """Return the batch axis of a part."""
        key = _key(candidate, draft)
        return self.sized.get(key, self.reached.get(key, self.counted.get(key)))

    def by_number(self, candidate: Candidate, draft: Draft) -> bool:
        """Say whether only its size tells the batch axis of a part."""
        key = _key(candidate, draft)
        return key in self.counted and key not in self.sized and key not in self.reached

    def shared(self, candidate: Candidate, draft: Draft) -> bool:
        """Say whether all rows are known to share a part."""
        key = _key(candidate, draft)
        return key in self.fixed and key not in self.sized

    def mixed(self, candidate: Candidate, draft: Draft) -> bool:
        """Say whether a part has rows, but not each of its own input alone."""
        key = _key(candidate, draft)
        return key in self.tested and key in self.sized and self.reached.get(key) != self.sized[key]


def _key(candidate: Candidate, draft: Draft) -> tuple[str, str, str]:
    return candidate.module, candidate.line, draft.name


def axes_of(call: ModelCall, analysis: Analysis, before: Found | None = None) -> Axes:
    """Find the batch axis of every part of every candidate; what an earlier call has told holds."""
    axes = Axes()
    if before is not None:
        axes.reached.update(
            ((each.module, each.line, part.name), part.batch_axis)
            for each in before.recurrences
            for part in each.parts
            if part.batch_axis is not None and not part.counted
        )
        axes.counted.update(
            ((each.module, each.line, part.name), part.batch_axis)
            for each in before.recurrences
            for part in each.parts
            if part.batch_axis is not None and part.counted
        )
        asked = {(each.module, each.line, part.name) for each in before.recurrences for part in each.parts}
        if all(_key(c, d) in asked for c in analysis.candidates for d in c.drafts):
            return axes
    for axis in (0, 1):
        if not axes.reached and analysis.candidates:  # rows that lie along one axis of the input lie along no other
            _by_running_again(axes, call, analysis, axis)
            if axes.reached:
                axes.along = axis
                _by_other_state(axes, analysis, batch_of(inputs_of(call, analysis.trace), axis) or 0)
    for axis in (0, 1) if not call.is_real and _missing(axes, analysis) else ():
        changed = other_size(call.inputs, axis)
        other = _again(call, changed[0], analysis) if changed is not None else None
        if other is not None and changed is not None:
            _by_size(axes, analysis, other, changed[1:])
        kept = [(c, d) for c in analysis.candidates if c.kind == "attribute" for d in c.drafts]
        alone = any(_key(*each) in axes.sized and _key(*each) not in axes.tested for each in kept)
        if not _missing(axes, analysis) and not alone:
            break
        altered = other_row(call.inputs, axis)
        other = _again(call, altered, analysis) if altered is not None else None
        if other is not None:
            _by_row(axes, _both(analysis, other), batch_of(call.inputs, axis) or 0)
        if not _missing(axes, analysis):
            break
    if call.is_real:
        _by_number(axes, analysis, batch_of(inputs_of(call, analysis.trace), axes.along) or 0)
    return axes


def _by_number(axes: Axes, analysis: Analysis, rows: int) -> None:
    """Take the only axis with as many entries as there are rows, where nothing else tells; it is said."""
    for candidate in analysis.candidates:
        for draft in candidate.drafts:
            shape = next((value.shape for value in draft.values if value is not None), ())
            fits = [axis for axis, size in enumerate(shape) if size == rows]
            if axes.of(candidate, draft) is None and len(fits) == 1 and candidate.kind != "cache":
                axes.counted[_key(candidate, draft)] = fits[0]


def _by_running_again(axes: Axes, call: ModelCall, analysis: Analysis, axis: int) -> None:
    """Run the operations that lead to the first steps of each part again, with something else in one row."""
    parts = [(c, d, [v for v in d.values[:_TURNS] if v is not None]) for c in analysis.candidates for d in c.drafts]
    inputs = inputs_of(call, analysis.trace)
    targets = [v for _, _, values in parts for v in values]
    made = run_with(analysis.trace, inputs, other_row(inputs, axis), targets)
    if made is not None:
        as_was = run_with(analysis.trace, inputs, unaltered(inputs, axis), targets) or {}

        def pair(value: Value) -> tuple[Tensor | None, Tensor | None]:
            old = as_was.get(value.number, value.data())
            return old, made.get(value.number, old)

        pairs = ((c, d, [pair(v) for v in values]) for c, d, values in parts)
        _by_row(axes, pairs, batch_of(inputs, axis) or 0)


def inputs_of(call: ModelCall, trace: Trace) -> Any:
    """Return what the call was given, or what the iterator that it was given brought."""
    if not trace.lazy:
        return call.inputs
    return [value.tensor for value in trace.memory.values if value.origin == "argument" and value.op < 0]


def run_with(trace: Trace, inputs: Any, altered: Any, targets: list[Value]) -> dict[int, Tensor] | None:
    """Run what leads to some values again, with other inputs; None where that is not possible."""
    given = {id(value.tensor): value for value in trace.memory.values if value.origin == "argument" and value.op < 0}
    pairs = zip(leaves(inputs), leaves(altered), strict=True) if altered is not None else ()
    made = {given[id(old)].number: new for (_, old), (_, new) in pairs if old is not new and id(old) in given}
    last = max((value.op for value in targets), default=-1)
    if not made:
        return None
    try:
        return run_again(trace, sorted(reaching(trace, targets, (0, last + 1))), made, only_changed=True)
    except Exception:  # numbers that are lost, or an operation that cannot be run out of its place
        return None


def _by_other_state(axes: Axes, analysis: Analysis, rows: int) -> None:
    """Change one row of a part, and see which rows of all parts the next repetition changes."""
    for candidate in analysis.candidates:
        known = {id(draft): axes.of(candidate, draft) for draft in candidate.drafts}
        for draft in candidate.drafts:
            before = draft.values[0]
            old = before.data() if before is not None else None
            if known[id(draft)] is not None or before is None or old is None or candidate.windows.count < 2:
                continue
            fits = []
            for axis in [axis for axis, size in enumerate(old.shape) if size == rows]:
                known[id(draft)] = axis
                if _stays_in_its_row(analysis, candidate, before, axis, known):
                    fits.append(axis)
            known[id(draft)] = fits[0] if len(fits) == 1 else None
            if len(fits) == 1:
                axes.reached.setdefault(_key(candidate, draft), fits[0])


def _stays_in_its_row(
    analysis: Analysis, candidate: Candidate, part: Value, axis: int, known: dict[int, int | None]
) -> bool:
    """Say whether another first row of a part reaches only the first row of each part whose rows are known."""
    trace, old = analysis.trace, part.data()
    if old is None or old.shape[axis] < 2 or not (old.is_floating_point() or old.is_complex()):
        return False
    other = old.clone()
    other.select(axis, 0).mul_(0.7).add_(0.1)
    targets = [(d, v) for d in candidate.drafts if (v := d.values[1]) is not None]
    span = (part.op + 1, max(value.op for _, value in targets) + 1)
    try:
        made = run_again(trace, sorted(reached(trace, {part.number}, span)), {part.number: other})
    except Exception:  # see `run_with`
        return False
    moved = False
    for draft, value in targets:
        before, rows = value.data(), known[id(draft)]
        after = made.get(value.number)
        if before is None or after is None or torch.equal(before, after):
            continue
        if rows is None or before.shape != after.shape or axis_by_row([(before, after)], before.shape[rows]) is None:
            return False
        rest = torch.arange(1, before.shape[rows], device=before.device)
        if not torch.equal(before.index_select(rows, rest), after.index_select(rows, rest)):
            return False
        moved = True
    return moved


def _missing(axes: Axes, analysis: Analysis) -> bool:
    """Say whether some part's rows are unknown; a part that kept its size while others followed the rows has none."""
    told = bool(axes.sized or axes.reached)
    parts = [(c, d) for c in analysis.candidates for d in c.drafts if c.kind != "cache" and _has_axes(d)]
    return any(axes.of(c, d) is None and not (told and axes.shared(c, d)) for c, d in parts)


def _has_axes(draft: Draft) -> bool:
    return any(value is not None and value.shape for value in draft.values)


def _again(call: ModelCall, inputs: Any, analysis: Analysis) -> Analysis | None:
    """Make another call and analyze it; None where the model cannot be called so."""
    try:
        with call.unharmed():
            trace = call.traced(inputs, enough=_enough(analysis))
            return None if trace.broken is not None else analyze(trace)
    except Exception:  # a trial with rows that the model may not take
        return None


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


def _both(one: Analysis, other: Analysis) -> Iterator[tuple[Candidate, Draft, _Pairs]]:
    for candidate, draft, match in _pairs(one, other):
        values = zip(draft.values[:_TURNS], match.values[:_TURNS], strict=False)
        yield candidate, draft, [(a.data(), b.data()) for a, b in values if a is not None and b is not None]


def _by_size(axes: Axes, one: Analysis, other: Analysis, sizes: tuple[int, int]) -> None:
    for candidate, draft, match in _pairs(one, other):
        before, after = draft.values[0], match.values[0]
        if candidate.kind == "cache" or before is None or after is None:
            continue
        axis = axis_by_size(before.shape, after.shape, sizes)
        if axis is not None:
            axes.sized.setdefault(_key(candidate, draft), axis)
        elif before.shape == after.shape:
            axes.fixed.add(_key(candidate, draft))


def _by_row(axes: Axes, parts: Iterable[tuple[Candidate, Draft, _Pairs]], rows: int) -> None:
    for candidate, draft, pairs in parts:
        both = [(old, new) for old, new in pairs if old is not None and new is not None]
        if both and _key(candidate, draft) in axes.sized:
            axes.tested.add(_key(candidate, draft))
        axis = axis_by_row(both, rows)
        if axis is not None and candidate.kind != "cache":
            axes.reached.setdefault(_key(candidate, draft), axis)


def batch_of(inputs: Any, axis: int) -> int | None:
    """Return how many rows a call has, if its rows lie along `axis`."""
    found = tensors(inputs).values()
    sizes = [tensor.shape[axis] for tensor in found if tensor.dim() > max(axis, 1)]
    sizes = sizes or [tensor.shape[axis] for tensor in found if tensor.dim() > axis]
    return sizes[0] if sizes else None


def _changed(inputs: Any, axis: int, change: Any) -> Any:
    """Return the inputs with every tensor changed that has the rows of the call along `axis`."""
    rows = batch_of(inputs, axis)

    def end(_: Any, thing: Any) -> Any:
        fits = isinstance(thing, Tensor) and thing.layout is torch.strided and thing.dim() > axis
        return change(thing) if fits and thing.shape[axis] == rows else thing

    return mapped(inputs, end)


def other_size(inputs: Any, axis: int) -> tuple[Any, int, int] | None:
    """Return the inputs with another number of rows along `axis`, and both numbers."""
    rows = batch_of(inputs, axis)
    if rows is None or rows == 0:
        return None
    fewer = rows > 2

    def resized(tensor: Tensor) -> Tensor:
        if fewer:
            return tensor.narrow(axis, 0, rows - 1)
        return torch.cat([tensor, tensor.narrow(axis, 0, 1)], dim=axis)

    return _changed(inputs, axis, resized), rows, rows - 1 if fewer else rows + 1


def other_row(inputs: Any, axis: int, row: int = 0) -> Any | None:
    """Return the inputs with something else in one row."""
    rows = batch_of(inputs, axis)
    if not rows:
        return None

    def altered(tensor: Tensor) -> Tensor:
        if tensor.dim() < 2:
            return tensor
        new = tensor.detach().clone()
        first, second = new.select(axis, row), new.select(axis, (row + 1) % rows)
        if tensor.is_floating_point() or tensor.is_complex():
            first.copy_(0.6 * second + 0.3 * first.flip(0) + 0.05)
        elif tensor.dtype is not torch.bool:
            others = [second, first.flip(-1), (first - 1).abs()]  # zero becomes one, and nothing leaves its range
            first.copy_(next((other for other in others if not torch.equal(other, first)), first))
        return new

    return _changed(inputs, axis, altered)


def unaltered(inputs: Any, axis: int) -> Any:
    """Return copies: what is run again with them shows what something else in one row alone changes.

    Other places in memory are rounded otherwise, and a layer that was handed a state by somebody else starts anew.
    """
    return _changed(inputs, axis, lambda tensor: tensor.detach().clone())


def turned(inputs: Any, axis: int) -> Any:
    """Return the inputs with the order along `axis` turned around."""
    return _changed(inputs, axis, lambda tensor: tensor.detach().flip(axis))


def axis_by_size(one: tuple[int, ...], other: tuple[int, ...], sizes: tuple[int, int]) -> int | None:
    """Return the axis that followed the number of rows."""
    if len(one) != len(other):
        return None
    moved = [axis for axis, pair in enumerate(zip(one, other, strict=True)) if pair[0] != pair[1]]
    return moved[0] if len(moved) == 1 and (one[moved[0]], other[moved[0]]) == sizes else None


def axis_by_row(pairs: list[tuple[Tensor, Tensor]], rows: int, row: int = 0) -> int | None:
    """Return the axis along which only one entry changed, in tensors before and after something else in that row."""
    if not pairs or any(each.shape != pairs[0][0].shape for pair in pairs for each in pair):
        return None
    changed = torch.zeros(pairs[0][0].shape, dtype=torch.bool)
    for one, other in pairs:
        changed |= (one != other).cpu()
    if not bool(changed.any()):
        return None
    fits = []
    for axis, size in enumerate(changed.shape):
        others = [index for index in range(size) if index != row]
        if size == rows and not bool(changed.index_select(axis, torch.tensor(others, dtype=torch.long)).any()):
            fits.append(axis)
    return fits[0] if len(fits) == 1 else None
