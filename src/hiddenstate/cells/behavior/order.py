"""Whether a state may continue into the next call, so that pieces of the input give what the whole gives."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from .candidates import Analysis
from .chains import Chain
from .found import Cut, Recurrence
from .handed_back import changed_on_the_way, crossing_beside, goes_on, summing_up
from .influence import Untold, Way
from .memory import Value
from .operation import DRAWS, ModuleCall, Op
from .places import Scope
from .trace import Trace


@dataclass(frozen=True, slots=True)
class Reason:
    """Why pieces of the input cannot give what the whole gives."""

    text: str
    unless_kept: bool = False  # it may not hold if the model itself keeps something from call to call
    carried: bool = False
    usual: bool = False
    changed: bool = False
    beside: bool = False


FROM_THE_END = Reason("it reads the call's input from the end: what it ends in belongs to the first step")
ALL_STEPS = Reason("its input at every step depends on all steps of the call's input", carried=True)
ACROSS = Reason(
    "what stands in front looks across the cut: one step of its input takes several of the call's", True, carried=True
)
IN_FRONT = Reason("its first step is none of the call's own input: every piece would begin with it once more", True)
DRAWN = Reason("its weights are drawn anew in every call", carried=True, usual=True)

_CALLS = 4  # calls of a cell whose inputs are examined
_AXES = 3  # the first axes of an argument, one of which may be time


@dataclass(slots=True, eq=False, repr=False)
class Reader:
    """Something recurrent that reads the call's input, in one call or step by step."""

    place: tuple[str, str]  # the module, and the line that calls it
    inputs: list[list[Value]]  # the input of each of its first steps; a layer that runs all steps has one entry
    calls: list[ModuleCall] = field(default_factory=list)
    states: set[tuple[Any, ...]] = field(default_factory=set)  # arguments that are states, not input
    loop: Scope | None = None
    fixed: set[int] = field(default_factory=set)  # values taken as constant: its own state
    stepped: bool = True
    seen: dict[tuple[int, int | None], set[str]] = field(
        default_factory=lambda: defaultdict(set)
    )  # by argument and axis

    @property
    def steps(self) -> int:
        """The number of steps it takes."""
        if self.stepped:
            return len(self.calls) if self.calls else len(self.loop.turns) if self.loop is not None else 0
        packed, shape = _batch_sizes(self), self.inputs[0][0].shape
        return len(packed) if packed is not None else shape[_time_axis(self, len(shape))]


@dataclass(frozen=True, slots=True)
class Cuts:
    """The recurrences of a call that cannot be cut anywhere, with the reasons."""

    reasons: dict[tuple[str, str], Reason]
    times: tuple[tuple[str, int], ...] = ()  # arguments that are read step by step, by label, with the time axis

    def beside(self, recurrences: Iterable[Recurrence]) -> tuple[Cut, ...]:
        """Return the cuts that remain given these recurrences: windows and sums that the model keeps need no carry."""
        keeps = any(one.kind == "attribute" for one in recurrences)
        told = {place: why for place, why in self.reasons.items() if not (keeps and why.unless_kept)}
        return tuple(
            Cut(*place, why.text, carried=why.carried, usual=why.usual, changed=why.changed, beside=why.beside)
            for place, why in told.items()
        )


def cuts_of(analysis: Analysis) -> Cuts:
    """Find out in what order each recurrence reads the call's input, and what is passed back to it."""
    try:
        return _cuts(analysis)
    except Exception as error:  # a mistake of ours must not undo what was found
        analysis.doubt(
            ("", ""), f"whether what recurs may be carried was not examined ({type(error).__name__}: {error})"
        )
        return Cuts({})


def _cuts(analysis: Analysis) -> Cuts:
    readers = [reader for reader in _readers(analysis) if reader.inputs]
    arguments = [value for value in analysis.trace.memory.values if value.origin == "argument" and value.op < 0]
    wide = [value for value in arguments if len(value.shape) > 1] or arguments
    for reader in readers:
        for each in _lists(wide):
            _read(analysis, reader, each)
    times = {axis for reader in readers for axis, seen in reader.seen.items() if seen - {"all"}}
    found: dict[tuple[str, str], Reason] = {}
    for reader in readers:
        if not (reader.calls and getattr(reader.calls[0].module, "bidirectional", False)):
            why = _by_order(reader, times, wide) or _by_steps(analysis, reader, readers)
            found.update({reader.place: why} if why is not None else {})
    labels = {value.number: value.label for value in wide}
    read = [(reader, each) for reader in readers for each, seen in reader.seen.items() if seen - {"all"}]
    shapes = {value.number: value.shape for value in wide}
    along = [(reader.steps, number, axis) for reader, (number, axis) in read if axis is not None]
    exact = [each for each in along if shapes[each[1]][each[2]] == each[0]] or along
    sizes = {shapes[number][axis] for _, number, axis in exact[:1]}
    same = [(labels[number], axis) for _, number, axis in exact if shapes[number][axis] in sizes]
    return Cuts(found, tuple(dict.fromkeys(same)))


def _by_steps(analysis: Analysis, reader: Reader, readers: list[Reader]) -> Reason | None:
    """Return why a module's result is not all that its next call would need."""
    trace, calls = analysis.trace, reader.calls
    if not calls:
        return None
    known = [call for call in trace.calls if call.module is calls[0].module and call.known and call.results]
    changed = changed_on_the_way(trace, known or calls, reader.states, reader.loop)
    if changed is not None:
        return Reason(f"what is handed back is not what it gave, but made of it{changed}", changed=True)
    others = crossing_beside(analysis, calls, reader.loop)
    if not _handed(reader):  # otherwise the model starts both
        same = [one for one in readers if one.loop is reader.loop is not None and one.calls and one is not reader]
        started = [one for one in same if any(not goes_on(trace, value) for value in _handed(one))]
        others += [f"the state of {one.place[0]}" for one in started if one.place != reader.place]
    others = others or summing_up(analysis, reader.inputs, reader.loop)
    if others:
        verb = "crosses" if len(others) == 1 else "cross"
        return Reason(f"{', '.join(others)} {verb} beside it, and would begin anew in every call", True, beside=True)
    return DRAWN if _drawn(trace, calls[0].module) else None


def _handed(reader: Reader) -> list[Value]:
    """Return the state that the first call was given."""
    return [value for place, value in reader.calls[0].args if place in reader.states]


def _readers(analysis: Analysis) -> Iterator[Reader]:
    """Yield layers known by type, cells that were found, and loops."""
    trace, chained = analysis.trace, set()
    found: list[Chain] = [chain for chain in analysis.chains if chain.known]
    found += [one.chain for one in analysis.candidates if one.kind == "cell" and one.chain is not None]
    for chain in found:
        chained.add(chain.module)
        if chain.path not in analysis.iterated:
            yield _stepped(trace, chain.calls, set(chain.parts))
    alone: dict[nn.Module, list[ModuleCall]] = defaultdict(list)
    for call in trace.calls:
        if call.known and call.module not in chained and call.args and call.results:
            alone[call.module].append(call)
    for module, calls in alone.items():
        if hasattr(module, "batch_first"):
            for call in calls:
                given = [value for place, value in call.args if not _is_state(place)]
                yield Reader(_place(call), [given[:1]] if given else [], [call], stepped=False)
        elif len(calls) > 1:
            yield _stepped(trace, calls, set())
    fixed = {number for one in analysis.candidates for number in one.numbers}
    fixed.update(*(chain.on_the_way for chain in analysis.chains))
    for one in analysis.candidates:
        if one.kind in ("loop", "layer") and one.windows.scope is not None:
            parts = [list(enumerate(draft.values[:_CALLS])) for draft in one.drafts]
            made = [[v for turn, v in part if v is not None and one.windows.turn(v.op) == turn] for part in parts]
            inputs = [values for values in made if len(values) == min(_CALLS, one.windows.count)]
            yield Reader((one.module, one.line), inputs, loop=one.windows.scope, fixed=fixed)


def _stepped(trace: Trace, calls: list[ModuleCall], parts: set[tuple[Any, ...]]) -> Reader:
    known = {place for call in calls for place, _ in call.args if call.known and _is_state(place)}
    given = [{place: value for place, value in call.args if place not in parts | known} for call in calls[:_CALLS]]
    inputs = [[each[place] for each in given if place in each] for place in given[0]]
    inputs = [values for values in inputs if len(values) == len(given)]
    fixed = {value.number for call in calls for _, value in call.results}
    return Reader(_place(calls[-1]), inputs, calls, parts | known, _loop(trace, calls), fixed)


def _place(call: ModuleCall) -> tuple[str, str]:
    file, line = call.site
    return call.path, f"{os.path.basename(file)}:{line}"


def _is_state(place: tuple[Any, ...]) -> bool:
    return place[:2] in (("args", 1), ("kwargs", "hx"), ("kwargs", "state"))


def _loop(trace: Trace, calls: list[ModuleCall]) -> Scope | None:
    """Return the innermost loop that makes all of these calls, in separate turns."""
    start, end = calls[0].start, calls[-1].end
    loops = [s for s in trace.places.scopes if s.kind == "loop" and s.start <= start and end <= s.end]
    return max((s for s in loops if len(s.turns) >= len(calls)), key=lambda s: s.start, default=None)


# -- in what order the input is read ----------------------------------------------------------------------------------


def _read(analysis: Analysis, reader: Reader, arguments: list[Value]) -> None:
    """Note in what order a reader takes an argument or a list of arguments, along each axis that may be time."""
    shape = arguments[0].shape[:_AXES]
    for targets in reader.inputs:
        way = Way(analysis.trace, arguments, targets, reader.fixed)
        axes: list[int | None] = [axis for axis, size in enumerate(shape) if size > 1]
        axes.sort(key=lambda axis: shape[axis or 0] != reader.steps)
        for axis in [] if not way.leads else [None] if len(arguments) > 1 else axes:
            size = len(arguments) if axis is None else shape[axis]
            try:
                order = _order(analysis, reader, Reached(reader, way, axis, size))
            except Untold:
                continue
            if order:
                reader.seen[arguments[0].number, axis].add(order)
            if order == "in order":
                break


def _lists(arguments: list[Value]) -> list[list[Value]]:
    """Return the arguments, and lists of them that may have one entry for each step."""
    lists: dict[str, list[Value]] = defaultdict(list)
    for value in arguments:
        outer, _, last = value.label.rstrip("]").rpartition("[")
        if last.isdigit() and outer.count("[") > 1:  # not the positional arguments of the call themselves
            lists[f"{outer} {value.shape}"].append(value)
    return [*([value] for value in arguments), *(each for each in lists.values() if len(each) > 1)]


def _batch_sizes(reader: Reader) -> Tensor | None:
    """Return the number of rows at each step of a packed sequence."""
    places = dict(reader.calls[0].args)
    at = next(place for place in places if not _is_state(place))
    packed = places.get((*at[:-1], 1)) if len(at) == 3 and at[-1] == 0 else None
    return None if packed is None or packed.tensor.is_floating_point() else packed.data()


def _time_axis(reader: Reader, axes: int) -> int:
    return 1 if axes > 2 and bool(reader.calls[0].module.batch_first) else 0


def _order(analysis: Analysis, reader: Reader, reached: Reached) -> str:
    """Return in what order the steps along an axis reach a reader; "" if they do not, or if it is unknown."""
    along = None if reader.stepped else _time_axis(reader, reached.at(0)[0].dim())
    if any(_apart(one, other, along) for one, other in zip(reached.at(0), reached.at(-1), strict=True)):
        return ""
    order = _order_of_rows(reached)
    across = order == "in order" and (reader.loop or not reader.stepped) and _overlap(reached)
    stepped = [(call.start, call.end) for chain in analysis.chains for call in chain.calls if not call.known]
    return "across" if across and not reached.way.recurs(reader.loop, analysis.timed, stepped) else order


@dataclass(slots=True, eq=False, repr=False)
class Reached:
    """Which steps of a reader depend on each step along an axis of an argument."""

    reader: Reader
    way: Way
    axis: int | None
    size: int
    _masks: dict[int, list[Tensor]] = field(default_factory=dict)
    _rows: dict[int, Tensor] = field(default_factory=dict)

    def at(self, step: int) -> list[Tensor]:
        """Return what changes in the input of each call if one step of the argument changes."""
        step %= self.size
        if step not in self._masks:
            self._masks[step] = _unpacked(self.reader, self.way.changed(self.axis, step))
        return self._masks[step]

    def rows(self, step: int) -> Tensor:
        """Return which steps of each row are reached; for a cell, of all rows together."""
        if step not in self._rows:
            self._rows[step] = self._by_row(self.at(step)).cpu()
        return self._rows[step]

    def _by_row(self, masks: list[Tensor]) -> Tensor:
        if self.reader.stepped:
            return torch.stack([mask.any() for mask in masks]).unsqueeze(0)
        (mask,) = masks
        mask = mask.movedim(_time_axis(self.reader, mask.dim()), 1) if mask.dim() > 2 else mask.unsqueeze(0)
        return mask.flatten(2).any(2)


def _unpacked(reader: Reader, masks: list[Tensor]) -> list[Tensor]:
    """Return what is known of a packed sequence, with separate axes for rows and steps."""
    sizes = None if reader.stepped else _batch_sizes(reader)
    if sizes is None:
        return masks
    rows = nn.utils.rnn.pad_sequence(list(torch.split(masks[0], sizes.tolist())))  # (rows, steps, ...)
    return [rows if _time_axis(reader, rows.dim()) == 1 else rows.transpose(0, 1)]


def _apart(one: Tensor, other: Tensor, along: int | None) -> bool:
    """Say whether two steps reach different entries along some axis that is not time: then they are not steps."""
    for axis in range(one.dim()):
        if axis != along:
            first, last = (each.movedim(axis, 0).reshape(each.shape[axis], -1).any(1) for each in (one, other))
            if bool(first.any()) and bool(last.any()) and not bool((first & last).any()):
                return True
    return False


def _order_of_rows(reached: Reached) -> str:
    """Return what the first step of any row takes: the call's last step, all steps, none, or the first."""
    first, last = reached.rows(0), reached.rows(-1)
    begins, ends = first[:, 0], last[:, 0]
    backwards = ends & ~begins & first[:, -1]
    if reached.reader.stepped and bool((ends & ~begins).any()):  # only its first calls were examined
        before = reached.rows(-1 - max(1, reached.size // reached.reader.steps))
        backwards = ends & ~begins & before[:, 1] & ~before[:, 0] & ~last[:, 1]
    if bool(backwards.any()):
        return "from the end"
    if bool((begins & ends & ((first & last).float().mean(1) > 0.5)).any()):
        return "all"
    if not reached.reader.stepped and bool((ends & ~begins & first.any(1)).any()):
        return "across"
    if first.shape[1] > 2 and bool((~begins & ~ends & first[:, 1]).any()):
        second = reached.rows(1)
        if bool((~begins & ~ends & first[:, 1] & second[:, 2] & ~second[:, 0]).any()):
            return "in front"
    return "in order" if bool((begins & ~ends).any()) else ""


def _overlap(reached: Reached) -> bool:
    """Say whether neighboring steps share some entries but not all: overlapping windows, not frames."""
    first, last = reached.rows(0), reached.rows(-1)
    if not reached.reader.stepped and first.shape[1] == reached.size:
        return bool((first.sum(1) > 1).any() or (last.sum(1) > 1).any())
    pairs = [(first, reached.rows(1))]
    if torch.equal(*pairs[0]) and reached.size > 2:
        pairs.append((reached.rows(1), reached.rows(2)))
    return any(bool((one & other).any()) and not torch.equal(one, other) for one, other in pairs)


def _by_order(reader: Reader, times: set[tuple[int, int | None]], arguments: list[Value]) -> Reason | None:
    """Return why a reader's state cannot continue, given the order in which it takes its input."""
    # Not everything that a loop takes was followed: only what it reads step by step counts as time.
    times = times if reader.calls else set()
    seen = {axis: orders for axis, orders in reader.seen.items() if orders - {"all"} or axis in times}
    orders = set().union(*seen.values())
    if "in order" in orders and not any("in order" in each and len(each) > 1 for each in seen.values()):
        return None
    for order, why in (("all", ALL_STEPS), ("across", ACROSS), ("from the end", FROM_THE_END), ("in front", IN_FRONT)):
        if order in orders:
            return why
    return ALL_STEPS if not orders and reader.calls and _is_time(reader, arguments) else None


def _is_time(reader: Reader, arguments: list[Value]) -> bool:
    """Say whether an axis is time judging by its size alone, if nothing reads along it step by step."""
    shapes = {value.number: value.shape for value in arguments}
    for (number, axis), orders in reader.seen.items():
        if axis is None or axis > 1:
            continue
        shape, others = shapes[number], [a for (n, a) in reader.seen if n == number and a is not None and a != axis]
        steps = len(shape) > 2 or not next(v for v in arguments if v.number == number).tensor.is_floating_point()
        same = [other for other in others if shape[other] == reader.steps]
        if "all" in orders and steps and shape[axis] == reader.steps and not same:
            return True
    return False


def _drawn(trace: Trace, module: nn.Module) -> bool:
    """Say whether a known module's weights were made from random numbers in this call."""
    if not any(call.known for call in trace.calls if call.module is module):
        return False
    own = [tensor for tensor in vars(module).values() if isinstance(tensor, Tensor)]
    own += [tensor for tensor in module._parameters.values() if tensor is not None]
    todo = [store.first for tensor in own if (store := trace.memory.store_of(tensor)) is not None]
    for value in todo:
        if value.op >= 0 and len(todo) < _LONG:
            op = trace.ops[value.op]
            if op.name in DRAWS and _draws(op):
                return True
            todo += op.ins
    return False


def _draws(op: Op) -> bool:
    """Say whether an operation really drew: dropout in evaluation does not."""
    return not any(value.shape == op.outs[0].shape and _equal(value, op.outs[0]) for value in op.ins)


def _equal(one: Value, other: Value) -> bool:
    ours, theirs = one.data(), other.data()
    return ours is not None and theirs is not None and torch.equal(ours, theirs)


_LONG = 256  # values to go back from a weight
