"""State that modules keep from call to call: changed by one call, read by the next, with a row for each row."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from .analysis import moved_from
from .attribute_reads import is_cut, may_be_read, read_again, read_in_forward
from .candidates import Analysis
from .found import Found, Part, Recurrence, Unsure
from .memory import version_of
from .model_call import ModelCall
from .names import module_tensors, tensors_in
from .rows import axis_by_row, axis_by_size, batch_of, inputs_of, other_row, other_size, run_with, turned, unaltered
from .starts import starts_only
from .trace import Trace

Key: TypeAlias = tuple[str, str]  # module and name

_ROWS = 6  # rows that are tried one by one


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class AttributeValue:
    """What an attribute held at one time."""

    tensor: Tensor
    version: int
    content: Tensor


def kept_by(model: nn.Module) -> dict[Key, AttributeValue]:
    """Return every tensor that a model's modules keep and that is no parameter, by module and name."""
    return {
        (path, name): AttributeValue(tensor, version_of(tensor), tensor.detach().clone())
        for path, module in model.named_modules()
        for name, tensor in module_tensors(module)
    }


@dataclass(slots=True, eq=False, repr=False)
class Attributes:
    """What modules kept before and after a call, and where what is new came from."""

    old: dict[Key, AttributeValue]
    new: dict[Key, AttributeValue] = field(default_factory=dict)
    moved: list[Key] = field(default_factory=list)
    made: dict[Key, tuple[bool, str]] = field(default_factory=dict)  # depends on the call's input; line
    cut: set[Key] = field(default_factory=set)  # from their graph
    rerun: set[Key] = field(default_factory=set)  # read or made where activation checkpointing will run it once more

    @classmethod
    def before(cls, model: nn.Module) -> Attributes:
        """Look before the call."""
        return cls(kept_by(model))

    def after(self, model: nn.Module, trace: Trace, marks: bytearray) -> None:
        """Look after the call."""
        self.new = kept_by(model)
        self.rerun = read_again(trace, model, {key: one.tensor for key, one in self.new.items()}, home=_home)
        for key, now in self.new.items():
            old = self.old.get(key)
            if old is None or old.tensor is not now.tensor or old.version != now.version:
                self.moved.append(key)
                value = trace.peek(now.tensor)
                if value is not None:
                    line = trace.ops[value.op].where if value.op >= 0 else ""
                    self.made[key] = bool(marks[value.number]), line
                    if is_cut(trace, value, ".".join(filter(None, key))):
                        self.cut.add(key)


def kept_states(call: ModelCall, kept: Attributes, analysis: Analysis, before: Found | None = None) -> list[Recurrence]:
    """Return the attributes that are states, by calls made one after another and with other rows.

    What was found in an earlier call is not looked for again.
    """
    if before is not None:
        return [each for each in before.recurrences if each.kind == "attribute" and each.steps == 2]
    moved, modules = [], dict(call.model.named_modules())
    for key in kept.moved:
        if modules.get(key[0]) in call.known or _is_told(analysis, key, kept.new[key].tensor):
            continue  # what a layer that is known by its type keeps beside its state is its own business: weights, say
        from_input, line = kept.made.get(key, (None, ""))
        if from_input is None:
            analysis.doubt((key[0], ""), f"{key[1]} changed during the call, and what wrote it was not seen", kept=True)
        elif not from_input:
            analysis.leave((key[0], line), f"{key[1]} changes, but not by the call's input: a counter or constant")
        else:
            moved.append(key)
    if call.is_real:
        return _kept_on(call, kept, analysis, moved)
    if not moved:
        return []
    read, second = _read_later(call, moved)
    found = []
    for key in moved:
        where = (key[0], kept.made[key][1])
        if key not in second:
            analysis.doubt(
                where, f"{key[1]} is kept, but a second call could not be made to see if it is read", kept=True
            )
        elif key not in read:
            analysis.leave(where, f"{key[1]} is written, and the next call does not read it")
        else:
            found.append(key)
    return _recurrences(kept, analysis, second, _AttributeRows.of(call, kept, analysis, found)) if found else []


def _kept_on(call: ModelCall, kept: Attributes, analysis: Analysis, moved: list[Key]) -> list[Recurrence]:
    """Return the attributes that a call of the user's read as an earlier one left them; we make none of our own."""
    found = []
    for key in kept.moved:
        name, old = ".".join(filter(None, key)), kept.old.get(key)
        from_input, line = kept.made.get(key, (False, ""))
        home = _home(call.model, key, kept.new[key].tensor)
        unread = old is None or not _reads(analysis.trace, name)
        refilled = old is not None and unread and old.content.shape != kept.new[key].content.shape  # for other rows
        empty = old is None or not old.content.numel() or (refilled and read_in_forward(call.model, home))
        if from_input and empty:
            if not may_be_read(call.model, home):
                analysis.leave((key[0], line), f"{key[1]} is written, and no code of the model reads it before")
                continue
            why = f"{key[1]} is kept by a call that found nothing there: a second one tells whether it is read"
            analysis.later.append(str(Unsure(key[0], line, why)))
            analysis.maybe.append(key)
            analysis.caches |= not _given_by(analysis.trace, kept.new[key].tensor)
            analysis.going_on += [key] if read_in_forward(call.model, home) else []
        elif key in moved and not unread:
            found.append(key)
            analysis.caches |= kept.new[key].tensor.dim() > 1 and not _given_by(analysis.trace, kept.new[key].tensor)
        elif key in moved:
            analysis.leave((key[0], kept.made[key][1]), f"{key[1]} is written, and nothing reads what was there before")
        analysis.cleared += [key] if unread and old is not None else []
    return _recurrences(kept, analysis, kept.new, _AttributeRows.of(call, kept, analysis, found)) if found else []


def _given_by(trace: Trace, tensor: Tensor) -> str:
    """Return the known layer of whose end state a tensor is a part, moved or detached at most; "" where none is."""
    value = trace.peek(tensor)
    for op in trace.ops if value is not None else ():
        call = trace.calls[op.call]
        first = int(len(op.outs) > 1 and not isinstance(call.module, nn.RNNCellBase))  # behind the output
        if call.known and value is not None and moved_from(trace, value, {one.number for one in op.outs[first:]}):
            return call.path
    return ""


def _home(model: nn.Module, key: Key, tensor: Tensor) -> str:
    """Return the attribute in which a tensor lies: its own name, or that of the container or object that holds it."""
    module = dict(model.named_modules()).get(key[0], model)
    for name, value in vars(module).items():
        if name not in ("_parameters", "_modules") and any(one is tensor for _, one in tensors_in(value, name)):
            return next((each for each, one in value.items() if one is tensor), name) if name == "_buffers" else name
    return key[1].partition("[")[0]


def _is_told(analysis: Analysis, key: Key, tensor: Tensor) -> bool:
    """Say whether a recurrence has an attribute as its part already; a variable may bear the same name."""
    named = [c for c in analysis.candidates if c.module == key[0] and key[1] in {draft.name for draft in c.drafts}]
    value = analysis.trace.peek(tensor) if named else None
    known = [c for c in named if c.kind == "attribute" or (value and moved_from(analysis.trace, value, c.numbers))]
    return bool(known)


def _read_later(call: ModelCall, moved: list[Key]) -> tuple[set[Key], dict[Key, AttributeValue]]:
    """Call twice, one after the other, and see what the second call reads; also return what it leaves."""
    try:
        with call.unharmed():
            call.plain(call.inputs)
            trace = call.traced(call.inputs, enough=_replaced(call.model, moved))
            if trace.broken is not None:
                return set(), {}
            return {key for key in moved if _reads(trace, ".".join(filter(None, key)))}, kept_by(call.model)
    except Exception:  # a model that cannot be called twice with the same
        return set(), {}


def _reads(trace: Trace, label: str) -> bool:
    """Say whether an operation of a call reads what the attribute held before the call."""
    held = [value for value in trace.memory.values if value.label == label and value.op < 0]
    numbers = {value.number for value in held}
    stores = {id(value.store) for value in held if value.store is not None}
    for op in trace.ops:
        for value in op.ins:
            if value.number in numbers:
                return True
            if value.op < 0 and value.store is not None and id(value.store) in stores and value.origin != "argument":
                return True
    return False


def _replaced(model: nn.Module, moved: list[Key]) -> Any:
    """Say when a call has put something else in the place of all that was kept: then it cannot read it any more."""
    modules = dict(model.named_modules())
    homes = [modules[path] for path in dict.fromkeys(path for path, _ in moved)]
    held: set[int] = set()

    def enough(trace: Trace) -> bool:
        if not held:  # at the first operation of the second call
            held.update(id(kept.tensor) for key, kept in kept_by(model).items() if key in moved)
        if len(trace.ops) % 256:
            return False
        now = {id(tensor) for module in homes for _, tensor in module_tensors(module)}
        if held & now:
            return False
        first = {value.number for value in trace.memory.values if value.op < 0 and id(value.tensor) in held}
        return not any(value.number in first for op in trace.ops for value in op.ins)

    return enough


@dataclass(slots=True, eq=False, repr=False)
class _AttributeRows:
    """The batch axis of each attribute, or why it has none."""

    keys: list[Key]
    axes: dict[Key, int] = field(default_factory=dict)
    shared: dict[Key, str] = field(default_factory=dict)  # statistics
    doubts: dict[Key, str] = field(default_factory=dict)
    by_all: set[Key] = field(default_factory=set)  # reached as a whole from everywhere along the first axis, as by time

    @classmethod
    def of(cls, call: ModelCall, kept: Attributes, analysis: Analysis, keys: list[Key]) -> _AttributeRows:
        """Run the call again with something else in one row; where that does not tell, make calls with other rows.

        A state follows the number of rows, and each of its rows is reached by that row's input alone. That much holds
        of a mean over rows too, if one takes features for rows: what lies along the second axis are only rows if the
        order along the first one matters, as it does in time.
        """
        found = cls(keys)
        for axis in (0, 1):
            if not found.axes:
                found._within(axis, call, analysis, {key: kept.new[key] for key in keys})
        told = {*found.axes, *found.shared, *found.doubts}
        for axis in (0, 1) if not call.is_real else ():
            left = [key for key in keys if key not in told and key not in found.axes]
            if left:
                found._along(axis, call, {key: kept.new[key].content for key in left})
        return found

    def _within(self, axis: int, call: ModelCall, analysis: Analysis, keys: dict[Key, AttributeValue]) -> None:
        """Judge by the operations of the call itself, run again with something else in one row after another."""
        trace, inputs = analysis.trace, inputs_of(call, analysis.trace)
        values = {key: value for key, kept in keys.items() if (value := trace.peek(kept.tensor)) is not None}
        rows, reached = batch_of(inputs, axis) or 0, {key: set[int]() for key in values}
        as_was = run_with(trace, inputs, unaltered(inputs, axis), list(values.values())) or {}
        before = {key: as_was.get(value.number, value.data()) for key, value in values.items()}
        for row in sorted({*range(min(rows, _ROWS) - 1), rows - 1}) if rows else ():
            made = run_with(trace, inputs, other_row(inputs, axis, row), list(values.values()))
            for key, value in values.items() if made is not None else ():
                old, new = before[key], made.get(value.number) if made is not None else None
                if old is None or new is None or torch.equal(old, new):
                    reached[key].add(-2)
                else:
                    only = axis_by_row([(old, new)], rows, row)
                    reached[key].add(-1 if only is None else only)
        still = run_with(trace, inputs, turned(inputs, 0), list(values.values())) if axis == 1 else None
        for key, value in values.items():
            along, old = reached[key], before[key]
            turned_to = None if still is None else still.get(value.number)
            if axis == 1 and (old is None or turned_to is None or _alike(turned_to, old) or key not in self.by_all):
                continue  # whatever the order along the first axis: a mean over rows, not time
            if axis == 0 and along == {-1}:
                self.by_all.add(key)
            if len(along) == 1 and min(along) >= 0:
                self.axes[key] = along.pop()
                self.shared.pop(key, None)
                self.doubts.pop(key, None)
            elif -1 in along and axis == 0 and rows > 1:
                if rows in value.shape:
                    self.doubts[key] = "has a row for each row, but rows reach each other: not carried"
                else:
                    self.shared[key] = "is shared by all rows: a statistic, not a state"

    def _along(self, axis: int, call: ModelCall, contents: dict[Key, Tensor]) -> None:
        """Judge by calls with another number of rows, and with something else in one row after another."""
        inputs = call.inputs
        resized = other_size(inputs, axis)
        if resized is None:
            return
        other = _after(call, resized[0])
        if resized[1] == 1 and other is not None:  # two rows tell what one does not
            inputs = resized[0]
        both = {key: (now, other[key]) for key, now in contents.items() if other is not None and key in other}
        followed = {key: axis_by_size(tuple(a.shape), tuple(b.shape), resized[1:]) for key, (a, b) in both.items()}
        if inputs is not call.inputs:
            contents = {key: now for key, (_, now) in both.items()}
        reached = _reached(call, inputs, axis, contents)
        still = _after(call, turned(inputs, 0)) if axis == 1 else None
        for key, content in contents.items():
            pooled = axis == 1 and (still is None or key not in still or _alike(still[key], content))
            alone = reached.get(key, -2)
            self._decide(key, axis, followed.get(key), alone, called=other is not None, pooled=pooled)

    def _decide(self, key: Key, axis: int, followed: int | None, reached: int, *, called: bool, pooled: bool) -> None:
        """Judge by the axis that followed the number of rows, and the one along which a row's input reached one row.

        `called`: the model could be called with another number of rows; `pooled`: the order of steps does not matter.
        """
        alone = reached >= 0 and not pooled
        if alone and (reached == followed or (not called and axis == 0)):
            self.axes[key] = reached
            self.doubts.pop(key, None)
        elif followed is not None and axis == 0 and reached != -2:
            self.doubts[key] = "has a row for each row, but rows reach each other: not carried"
        elif axis == 0 and (called or reached == -1) and followed is None:
            self.shared[key] = "is shared by all rows: a statistic, not a state"
        elif alone and not called:
            self.doubts.setdefault(key, "is kept from call to call, but whether rows share it is unknown")


def _reached(call: ModelCall, inputs: Any, axis: int, contents: dict[Key, Tensor]) -> dict[Key, int]:
    """Return the axis of each attribute along which another input in one row reaches that row only, row by row.

    -1 where it reaches others too; nothing where the model could not be called so.
    """
    rows = batch_of(inputs, axis) or 0
    found: dict[Key, set[int]] = {key: set() for key in contents}
    for row in sorted({*range(min(rows, _ROWS) - 1), rows - 1}) if rows > 1 else ():
        other = _after(call, other_row(inputs, axis, row))
        for key in found if other is not None else ():
            pair = [(contents[key], other[key])] if other is not None and key in other else []
            only = axis_by_row(pair, rows, row)
            found[key].add(-1 if only is None else only)
    return {key: (axes.pop() if len(axes) == 1 else -1) for key, axes in found.items() if axes}


def _alike(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and bool(torch.allclose(one.double(), other.double(), 1e-4, 1e-6, equal_nan=True))


def _after(call: ModelCall, inputs: Any) -> dict[Key, Tensor] | None:
    """Return what modules keep after a call; None where the model cannot be called so."""
    try:
        with call.unharmed():
            call.plain(inputs)
            return {key: kept.content for key, kept in kept_by(call.model).items()}
    except Exception:  # a trial with rows that the model may not take
        return None


def _recurrences(
    kept: Attributes, analysis: Analysis, second: dict[Key, AttributeValue], rows: _AttributeRows
) -> list[Recurrence]:
    parts: dict[tuple[str, str], list[Part]] = {}
    for key in rows.keys:
        where = (key[0], kept.made[key][1])
        first, later = kept.new[key].content, second[key].content
        if first.shape != later.shape:
            parts.setdefault(("cache", key[0]), []).append(_part(kept, key, (first, later), None))
        elif key in rows.axes:
            part = _part(kept, key, (first, later), rows.axes[key])
            part = replace(part, starts_only=starts_only(analysis, ".".join(filter(None, key))))
            parts.setdefault(("attribute", key[0]), []).append(part)
        elif key in rows.doubts:
            gave = _given_by(analysis.trace, kept.new[key].tensor)
            analysis.doubt(where, f"{key[1]} {rows.doubts[key]}", kept=True, gave=gave)
        elif key in rows.shared:
            analysis.leave(where, f"{key[1]} {rows.shared[key]}")
        else:
            why = f"{key[1]} is kept from call to call, but whether rows share it is unknown"
            analysis.doubt(where, why, kept=True, gave=_given_by(analysis.trace, kept.new[key].tensor))
    made = []
    for (kind, path), group in parts.items():
        line = kept.made[path, group[0].name][1]
        if kind == "cache":
            made.append(Recurrence("cache", path, line, 2, tuple(group), ("it grows from call to call",)))
        else:
            made.append(Recurrence("attribute", path, line, 2, tuple(group), _EVIDENCE))
    return made


_EVIDENCE = ("changed by one call and read by the next", "each row of it is reached by that row's input alone")


def _part(kept: Attributes, key: Key, values: tuple[Tensor, Tensor], axis: int | None) -> Part:
    old, first = kept.old.get(key), values[0]
    initial = None if old is None else old.content
    return Part(key[1], tuple(first.shape), first.dtype, axis, values, initial, cut=key in kept.cut)
