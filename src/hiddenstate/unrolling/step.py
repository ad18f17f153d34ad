"""One step of a cell as a pure function of flat tensors, with rows that end or start anew inside it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..cells import Layer, flatten, random_streams_kept
from ..errors import Untraceable
from ..state import State, ends, mapped
from .loop import rows_first
from .reading import StepReader
from .step_graph import Reading


@dataclass(frozen=True, slots=True, eq=False)
class StepArguments:
    """What a step is given: tensors that stay the same along time, and those of one step."""

    weights: list[Tensor]
    firsts: list[Tensor]  # the initial state's parts where rows may start anew, then what ended rows are given
    inputs: list[Tensor]  # x_t (batch, ...), then alive (batch,) and anew (batch,) where they are asked for
    states: list[Tensor]

    def flat(self) -> list[Tensor]:
        """Return all tensors in one list."""
        return [*self.weights, *self.firsts, *self.inputs, *self.states]

    def wanted(self) -> list[bool]:
        """Say for each tensor whether its gradient is asked for; states always pass theirs on."""
        given = [tensor.requires_grad for tensor in (*self.weights, *self.firsts, *self.inputs)]
        return [*given, *(part.is_floating_point() for part in self.states)]


class Step:
    """A cell's step with all it depends on handed in: weights, first state, input, state."""

    def __init__(self, layer: Layer, axes: dict[str, int], *, ends: bool, restarts: bool) -> None:
        """Step `layer`; with rows that have ended, and rows that start anew, as asked for."""
        self.layer, self.axes, self.ends, self.restarts = layer, axes, ends, restarts
        self.reading: Reading
        self._reader: StepReader
        self._seen: tuple[Tensor, Any]  # an input and a native state that the step was read with

    def read(self, reader: StepReader, x: Tensor, parts: Sequence[Tensor]) -> None:
        """Read the cell, as it is now, with an input and a state like these."""
        grad = torch.is_grad_enabled()
        own = [_leaf(tensor, grad) for tensor in (x, *parts)]
        # As in all steps but the first, whose state may come from nowhere.
        own[1:] = [part.requires_grad_() if _differentiable(part, grad) else part for part in own[1:]]
        native = self.layer.to_native(State(dict(zip(self.axes, own[1:], strict=True)), self.axes))
        if not self.layer.takes_state_second(own[0], native):
            raise Untraceable("its state is not its second argument, and only `cell(x, state)` is read")
        self._reader, self._seen = reader, (own[0], native)
        self.reading = reader.read(self.layer.module, own[0], native, _tensors(native))

    def read_again(self) -> None:
        """Read the cell with the same input and state, which takes as long as before every call."""
        x, native = self._seen
        self._reader.read(self.layer.module, x, native, _tensors(native))

    def without_example(self) -> Step:
        """Return the same step without the input and state that it was read with, which would be kept with it."""
        step = Step(self.layer, self.axes, ends=self.ends, restarts=self.restarts)
        step.reading = self.reading
        return step

    def try_out(self) -> None:
        """Run the graph once, on copies: find out how its results are nested, and refuse one that writes anywhere."""
        graph, (x, native) = self.reading.graph, self._seen
        if graph.form is not None:
            return
        own = [x, *_tensors(native)]
        with random_streams_kept(), torch.no_grad():
            outputs = self.reading.run_watched(own)
        result = self._reader.result(self.layer.module, x, native, outputs=outputs)
        slots = {id(value): ("made", place) for place, value in enumerate(outputs)}
        slots |= {id(value): ("own", place) for place, value in enumerate(own)}
        graph.form = mapped(result, lambda _, end: _slot(end, slots))

    def __call__(
        self, weights: Sequence[Tensor], firsts: Sequence[Tensor], inputs: Sequence[Tensor], states: Sequence[Tensor]
    ) -> list[Tensor]:
        """Return the output and the next states."""
        x, *masks = inputs
        count = len(self.axes)
        before = dict(zip(self.axes, states, strict=True))
        if self.restarts:
            anew = masks.pop()
            before = {
                name: torch.where(_along(anew, part, self.axes[name]), first.to(part.dtype), part)
                for (name, part), first in zip(before.items(), firsts[:count], strict=True)
            }
        if not self.ends:
            out, after = self._call(weights, x, State(before, self.axes))
            return [out, *(after[name] for name in self.axes)]
        # A row that has ended goes through its first step again, from which no number comes that was not there before.
        alive, held = masks.pop(), dict(zip(self.axes, firsts[-count:], strict=True))
        safe = {n: torch.where(_along(alive, p, self.axes[n]), p, held[n]) for n, p in before.items()}
        out, after = self._call(weights, x, State(safe, self.axes))
        after = {n: torch.where(_along(alive, p, self.axes[n]), p, before[n]) for n, p in after.items()}
        out = torch.where(_along(alive, out, 0), out, torch.zeros((), dtype=out.dtype, device=out.device))
        return [out, *(after[name] for name in self.axes)]

    def _call(self, weights: Sequence[Tensor], x: Tensor, state: State) -> tuple[Tensor, dict[str, Tensor]]:
        layer = self.layer
        own = [x, *_tensors(layer.to_native(state))]
        made = self.reading.run(weights, own)
        values = {"made": made, "own": own}
        form = self.reading.graph.form
        result = mapped(form, lambda _, end: values[end.kind][end.place] if isinstance(end, ResultSlot) else end)
        out, native = layer.split(result)
        after = _named(layer, native)
        for name, part in state.items():
            _check_unchanged(name, part, after[name])
        rows = rows_first(layer, out, State(after, self.axes), x.shape[0])
        return rows, after


class ResultSlot:
    """The place of a tensor in what a step returns: made by its graph, or its own argument handed on."""

    def __init__(self, kind: str, place: int) -> None:
        """Stand for the tensor at a place among those made, or among the step's own."""
        self.kind, self.place = kind, place


class StateChanges(Untraceable):
    """The state after a step is of another dtype than before it; after one plain step it may stay."""


def _slot(end: Any, slots: dict[int, tuple[str, int]]) -> Any:
    if id(end) in slots:
        return ResultSlot(*slots[id(end)])
    if isinstance(end, Tensor):
        raise Untraceable("it returns a tensor that it neither made nor was given")
    if end is None or isinstance(end, bool | int | float | str):
        return end
    raise Untraceable(f"it returns something that stays opaque, {type(end).__name__}")


def _tensors(native: Any) -> list[Tensor]:
    found = [end for _, end in ends(native)]
    odd = next((end for end in found if not isinstance(end, Tensor)), None)
    if odd is not None:
        raise Untraceable(f"its state holds something that stays opaque, {type(odd).__name__}")
    return found


def _leaf(tensor: Tensor, grad: bool) -> Tensor:
    """Return the same numbers as a tensor that leads nowhere, and is no other's."""
    leaf = tensor.detach()
    return leaf.requires_grad_() if tensor.requires_grad and _differentiable(tensor, grad) else leaf


def _differentiable(tensor: Tensor, grad: bool) -> bool:
    return grad and tensor.is_floating_point() and not tensor.is_inference()


def _named(layer: Layer, native: Any) -> dict[str, Tensor]:
    if layer.kind == "cell":
        return flatten(native)[0]
    return dict(layer.to_state(native))


def _along(mask: Tensor, part: Tensor, axis: int) -> Tensor:
    return mask.view([-1 if place == axis else 1 for place in range(part.dim())])


def _check_unchanged(name: str, before: Tensor, after: Tensor) -> None:
    if before.shape != after.shape:
        raise Untraceable(
            f"part {name!r} of its state changes its shape in a step, "
            f"from {tuple(before.shape)} to {tuple(after.shape)}"
        )
    if before.dtype != after.dtype or before.device != after.device:
        raise StateChanges(
            f"part {name!r} of its state changes in a step from {before.dtype} on {before.device} "
            f"to {after.dtype} on {after.device}"
        )
