"""What a call takes of several steps at once beside what recurs: positions, batch statistics, attention, means.

A state that goes on into the next call cannot bring these along. What follows the call's input is run again with
something else in one step; it is told from what that changes.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import prod

import torch
from torch import Tensor, nn

from ..listener import unheard
from ..snapshot import untouched
from .candidates import Analysis
from .found import Unsure
from .influence import Untold, Way, within_any
from .memory import Value
from .operation import GROWS, MOVES, Op
from .trace import Trace

BEHIND = "it takes several steps of a call at once (attention, a mean or a convolution over time, say)"
POSITIONS = "it counts the steps of each call from zero"
STATISTICS = "it takes statistics of all steps of a call (batch normalization in training)"

_FEWEST = 3  # steps
_ELEMENTWISE = {"add", "sub", "mul", "rsub", "add_", "mul_", "sub_", "__iadd__", "__imul__", "__isub__"}
_ELEMENTWISE |= {"__add__", "__sub__", "__mul__", "__radd__", "__rsub__", "__rmul__"}


def mixing(model: nn.Module, analysis: Analysis) -> tuple[Unsure, ...]:
    """Return where a call mixes its steps beside what recurs, each with its line; nothing where it cannot be told."""
    try:
        with untouched(model), unheard():
            return tuple(dict.fromkeys(_mixing(analysis)))
    except Untold:
        return ()


def _mixing(analysis: Analysis) -> Iterator[Unsure]:
    trace = analysis.trace
    x, axis = _along_time(analysis)
    if x is None or x.shape[axis] < _FEWEST or analysis.caches:
        return  # what it keeps itself may be what the next call needs
    states = _states(trace)
    outputs = [value for _, value in trace.calls[0].results if value.op >= 0 and value.tensor.numel() > 1]
    way = Way(trace, [x], outputs, states) if outputs else None
    if way is None or not way.leads:
        return
    stepped = [(call.start, call.end) for chain in analysis.chains for call in chain.calls]
    alone = not way.recurs(None, analysis.timed, stepped)
    made = [value for number in way.ops for value in trace.ops[number].outs if value.number not in states]
    reached = StepReach(Way(trace, [x], made, states), made, axis, x, alone)
    for number in way.ops:
        op = trace.ops[number]
        if _takes_statistics(op) and not within_any(op, analysis.timed) and reached.of_all_steps(op.ins[0]):
            yield _at(trace, op, STATISTICS)
        elif reached.adds_positions(op, analysis):
            yield _at(trace, op, POSITIONS)
    if any(reached.is_mixed(value) or reached.is_pooled(value) for value in outputs):
        for number in way.ops:
            op = trace.ops[number]
            if reached.mixes(op) and not _both_ways(op):
                yield _at(trace, op, BEHIND)
                return


class StepReach:
    """Which entries of each value the first and the last step of a call's input reach."""

    def __init__(self, way: Way, values: list[Value], axis: int, x: Value, alone: bool) -> None:
        """Run what follows `x` again; unless nothing on the way recurs, the first step reaches whatever comes later."""
        self._steps, self._alone, self._x = x.shape[axis], alone, x.number
        self._axis = axis
        tried = (0, self._steps - 1) if alone else (self._steps - 1,)
        self._masks: dict[int, dict[int, Tensor]] = {value.number: {} for value in values}
        for step in tried:
            for value, mask in zip(values, way.changed(axis, step), strict=True):
                self._masks[value.number][step] = mask

    def axis_of(self, value: Value) -> int | None:
        """Return the axis of a value along which its steps are those of the input, each made of its own."""
        if value.number == self._x:
            return self._axis
        for axis in self._long(value):
            if all(self._along(mask, axis) == [step] for step, mask in self._masks.get(value.number, {}).items()):
                return axis
        return None

    def is_mixed(self, value: Value) -> bool:
        """Say whether a value has an axis that may be time, and no step of it is made of its own step alone."""
        return bool(self._long(value)) and self.axis_of(value) is None and self._changes(value)

    def is_pooled(self, value: Value) -> bool:
        """Say whether all of a value is made of the first step and of the last."""
        masks = list(self._masks.get(value.number, {}).values())
        if not self._alone or len(value.shape) < 2 or self._long(value) or not self._changes(value):
            return False
        return torch.equal(masks[0], masks[1])

    def mixes(self, op: Op) -> bool:
        """Say whether an operation takes steps, and gives what is no longer made of one."""
        if not any(self._known(value) and self.axis_of(value) is not None for value in op.ins):
            return False
        if op.name in MOVES and all(prod(value.shape) < prod(op.ins[0].shape) for value in op.outs):
            return False  # it takes steps apart; where another axis is as long as time, a single step looks mixed
        return any(self.is_mixed(value) or self.is_pooled(value) for value in op.outs if self._known(value))

    def of_all_steps(self, value: Value) -> bool:
        """Say whether a value has several steps of the input in it."""
        if value.number == self._x:
            return True
        masks = list(self._masks.get(value.number, {}).values())
        return bool(masks) and all(bool(mask.any()) and not bool(mask.all()) for mask in masks)

    def adds_positions(self, op: Op, analysis: Analysis) -> bool:
        """Say whether an operation puts something to each step that nobody has handed in or drawn, and that varies."""
        if op.name not in _ELEMENTWISE | GROWS or len(op.outs) != 1 or not self._known(op.outs[0]):
            return False
        out = op.outs[0]
        axis = self.axis_of(out)
        if axis is None:
            return False
        for value in op.ins:
            own = None if analysis.moves[value.number] else value.data()
            along = axis - (len(out.shape) - len(value.shape))
            if own is None or along < 0 or value.shape[along] != self._steps:
                continue
            if not torch.equal(own, own.select(along, 0).unsqueeze(along).expand_as(own)):
                return True
        return False

    def _known(self, value: Value) -> bool:
        return value.number in self._masks or value.number == self._x

    def _long(self, value: Value) -> list[int]:
        return [axis for axis, size in enumerate(value.shape) if size == self._steps]

    def _changes(self, value: Value) -> bool:
        masks = self._masks.get(value.number, {})
        return bool(masks) and all(bool(mask.any()) for mask in masks.values())

    def _along(self, mask: Tensor, axis: int) -> list[int]:
        reached: list[int] = mask.movedim(axis, 0).flatten(1).any(1).nonzero()[:, 0].tolist()
        return reached


def _along_time(analysis: Analysis) -> tuple[Value | None, int]:
    """Return the argument that is read step by step, and the axis that is time."""
    times = dict(analysis.cuts.times[:1]) if analysis.cuts is not None else {}
    for value in analysis.trace.memory.values:
        if value.op < 0 and value.origin == "argument" and value.label in times:
            return value, times[value.label]
    return None, 0


def _states(trace: Trace) -> set[int]:
    """Return what layers of torch ended in: it is carried."""
    fused = [call for call in trace.calls if call.known and isinstance(call.module, nn.RNNBase)]
    return {value.number for call in fused for place, value in call.results if place[:1] == (1,)}


def _takes_statistics(op: Op) -> bool:
    training = op.kwargs.get("training", op.args[5] if len(op.args) > 5 else False)
    return op.name == "batch_norm" and training is True


def _both_ways(op: Op) -> bool:
    """Say whether it is a layer of torch that runs in both directions: that is said of it by its type."""
    return bool(getattr(getattr(op.func, "__self__", None), "bidirectional", False))


def _at(trace: Trace, op: Op, why: str) -> Unsure:
    return Unsure(trace.calls[op.call].path if op.call >= 0 else "", op.where, why)
