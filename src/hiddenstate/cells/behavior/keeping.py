"""Attributes as recurrences: changed by one call, read by the next, with a row for each row."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from .attributes import Kept, Look, changed, kept_by, look, read_in
from .calls import run
from .candidates import Analysis
from .found import Part, Recurrence
from .names import module_tensors
from .rows import axis_by_row, axis_by_size, batch_of, other_row, other_size
from .trace import Trace


@dataclass(slots=True, eq=False, repr=False)
class KeptState:
    """What modules kept before and after a call."""

    old: dict[tuple[str, str], Kept]
    new: dict[tuple[str, str], Kept] = field(default_factory=dict)
    moved: list[tuple[str, str]] = field(default_factory=list)
    looks: dict[tuple[str, str], Look] = field(default_factory=dict)

    @classmethod
    def before(cls, model: nn.Module) -> KeptState:
        """Look before the call."""
        return cls(kept_by(model))

    def after(self, model: nn.Module, trace: Trace) -> None:
        """Look after the call, and at where what is new came from."""
        self.new = kept_by(model)
        self.moved = changed(self.old, self.new)
        for key in self.moved:
            seen = look(trace, self.new[key])
            if seen is not None:
                self.looks[key] = seen


def kept_states(call: Any, keeping: KeptState, analysis: Analysis) -> list[Recurrence]:
    """Return the attributes that are states, by calls made one after another and with other rows."""
    inside = {(c.module, draft.name) for c in analysis.candidates for draft in c.drafts}
    moved = []
    for key in keeping.moved:
        seen = keeping.looks.get(key)
        if key in inside:
            continue
        if seen is None:
            analysis.doubt((key[0], ""), f"{key[1]} changed during the call, and what wrote it was not seen")
        elif not seen.from_input:
            analysis.leave((key[0], seen.line), f"{key[1]} changes, but not by the call's input: a counter or constant")
        else:
            moved.append(key)
    if not moved:
        return []
    read, second = _read_later(call, moved)
    found = []
    for key in moved:
        line = keeping.looks[key].line
        if key not in second:
            analysis.doubt(
                (key[0], line), f"{key[1]} is kept, but a second call could not be made to see if it is read"
            )
        elif key not in read:
            analysis.leave((key[0], line), f"{key[1]} is written, and the next call does not read it")
        else:
            found.append(key)
    return _with_rows(call, keeping, analysis, (found, second)) if found else []


def _read_later(call: Any, moved: list[tuple[str, str]]) -> tuple[set[tuple[str, str]], dict[tuple[str, str], Kept]]:
    """Call twice, one after the other, and see what the second call reads; also return what it leaves."""
    with call.snapshot.unharmed():
        try:
            call.model(*call.args, **call.kwargs)
            kept = kept_by(call.model)
            trace, _ = run(
                call.model, call.args, call.kwargs, known=call.known, enough=_replaced(call.model, kept, moved)
            )
        except Exception:  # a model that cannot be called twice with the same
            return set(), {}
        if trace.broken is not None:
            return set(), {}
        read = {key for key in moved if read_in(trace, ".".join(each for each in key if each))}
        return read, kept_by(call.model)


def _replaced(model: nn.Module, kept: dict[tuple[str, str], Kept], moved: list[tuple[str, str]]) -> Any:
    """Say when a call has put something else in the place of all that was kept: then it cannot read it any more."""
    modules = dict(model.named_modules())
    held = {id(kept[key].tensor) for key in moved if key in kept}
    homes = [modules[path] for path in dict.fromkeys(path for path, _ in moved)]

    def enough(trace: Trace) -> bool:
        if len(trace.ops) % 256:
            return False
        now = {id(tensor) for module in homes for _, tensor in module_tensors(module)}
        if held & now:
            return False
        values = trace.memory.values
        first = {n for n in range(len(values)) if values[n].op < 0 and id(values[n].tensor) in held}
        return not any(value.number in first for op in trace.ops for value in op.ins)

    return enough


def _with_rows(call: Any, keeping: KeptState, analysis: Analysis, found: Any) -> list[Recurrence]:
    keys, second = found
    axes: dict[tuple[str, str], int] = {}
    sized: dict[tuple[str, str], int] = {}
    tried = False
    for axis in (0, 1):
        rows = batch_of((call.args, call.kwargs), axis) or 0
        seen = [_rows_reached(call, keeping, keys, (axis, row, rows)) for row in (0, rows - 1)]
        tried = tried or any(each is not None for each in seen)
        # One row alone might hit one entry of something shared by chance; two do not.
        for key, row_axis in (seen[0] or {}).items():
            if (seen[1] or {}).get(key) == row_axis:
                axes.setdefault(key, row_axis)
        resized = other_size((call.args, call.kwargs), axis)
        other = _kept_after(call, resized[0]) if resized is not None and len(axes) < len(keys) else None
        for key in keys:
            if other is not None and resized is not None and key in other and key not in axes:
                row = axis_by_size(tuple(keeping.new[key].content.shape), tuple(other[key].content.shape), resized[1:])
                if row is not None:
                    sized[key] = row
    return _recurrences(keeping, analysis, (keys, second), (axes, sized, tried))


def _rows_reached(
    call: Any, keeping: KeptState, keys: list[tuple[str, str]], where: tuple[int, int, int]
) -> dict[tuple[str, str], int] | None:
    """Return the axis of each attribute along which another input in one row reaches that row only."""
    axis, row, rows = where
    inputs = other_row((call.args, call.kwargs), axis, row) if rows > 1 else None
    other = _kept_after(call, inputs) if inputs is not None else None
    if other is None:
        return None
    found = {
        key: axis_by_row([(keeping.new[key].content, other[key].content)], rows, row) for key in keys if key in other
    }
    return {key: found_axis for key, found_axis in found.items() if found_axis is not None}


def _kept_after(call: Any, inputs: Any) -> dict[tuple[str, str], Kept] | None:
    with call.snapshot.unharmed():
        try:
            call.model(*inputs[0], **inputs[1])
        except Exception:  # a trial with rows that the model may not take
            return None
        return kept_by(call.model)


def _recurrences(keeping: KeptState, analysis: Analysis, found: Any, rows: Any) -> list[Recurrence]:
    keys, second = found
    axes, sized, tried = rows
    by_module: dict[str, list[Part]] = {}
    lines: dict[str, str] = {}
    caches: list[Recurrence] = []
    for key in keys:
        where = (key[0], keeping.looks[key].line)
        first, later = keeping.new[key].content, second[key].content
        if first.shape != later.shape:
            part = _part(keeping, key, (first, later), None)
            caches.append(Recurrence("cache", *where, 2, (part,), ("it grows from call to call",)))
        elif key in axes:
            by_module.setdefault(key[0], []).append(_part(keeping, key, (first, later), axes[key]))
            lines.setdefault(*where)
        elif key in sized:
            analysis.doubt(where, f"{key[1]} has a row for each row, but rows reach each other: not carried")
        elif tried:
            analysis.leave(where, f"{key[1]} is shared by all rows: a statistic, not a state")
        else:
            analysis.doubt(where, f"{key[1]} is kept from call to call, but whether rows share it is unknown")
    evidence = ("changed by one call and read by the next", "each row of it is reached by that row's input alone")
    made = [Recurrence("attribute", path, lines[path], 2, tuple(parts), evidence) for path, parts in by_module.items()]
    return [*made, *caches]


def _part(keeping: KeptState, key: tuple[str, str], values: tuple[Tensor, Tensor], axis: int | None) -> Part:
    old = keeping.old.get(key)
    first = values[0]
    return Part(key[1], tuple(first.shape), first.dtype, axis, values, None if old is None else old.content)
