"""One step of a cell as a pure function of flat tensors, with rows that end or start anew inside it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..cells import Layer, flatten
from ..errors import Untraceable
from ..state import State
from .loop import rows_first
from .twins import members, twin


@dataclass(frozen=True, slots=True, eq=False)
class Arguments:
    """What a step is given: tensors that stay the same along time, and those of one step."""

    weights: list[Tensor]
    firsts: list[Tensor]  # the initial state's parts, empty where no row starts anew
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
        self._twin: nn.Module | None = None
        self._slots: list[tuple[str, int]] | None = None

    @property
    def module(self) -> nn.Module:
        """A twin of the cell: weights are swapped in it, which another thread must not see."""
        if self._twin is None:
            self._twin = twin(self.layer.module)
        return self._twin

    def weights(self) -> list[Tensor]:
        """Return the cell's parameters and buffers, each once."""
        inside = members(self.layer.module)
        parameters = {id(tensor): tensor for member in inside for tensor in member._parameters.values()}
        buffers = {id(tensor): tensor for member in inside for tensor in member._buffers.values()}
        return [tensor for tensor in (*parameters.values(), *buffers.values()) if tensor is not None]

    def __call__(
        self, weights: Sequence[Tensor], firsts: Sequence[Tensor], inputs: Sequence[Tensor], states: Sequence[Tensor]
    ) -> list[Tensor]:
        """Return the output and the next states."""
        x, *masks = inputs
        before = dict(zip(self.axes, states, strict=True))
        if self.restarts:
            anew = masks.pop()
            before = {
                name: torch.where(_along(anew, part, self.axes[name]), first.to(part.dtype), part)
                for (name, part), first in zip(before.items(), firsts, strict=True)
            }
        out, after = self._call(weights, x, State(before, self.axes))
        if self.ends:
            alive = masks.pop()
            after = {n: torch.where(_along(alive, p, self.axes[n]), p, before[n]) for n, p in after.items()}
            out = torch.where(_along(alive, out, 0), out, torch.zeros((), dtype=out.dtype, device=out.device))
        return [out, *(after[name] for name in self.axes)]

    def _call(self, weights: Sequence[Tensor], x: Tensor, state: State) -> tuple[Tensor, dict[str, Tensor]]:
        layer = self.layer
        if self._slots is None:
            self._slots = _slots(layer.module, self.weights())
        given = {name: weights[number] for name, number in self._slots}
        result = torch.func.functional_call(self.module, given, (x, layer.to_native(state)), tie_weights=False)
        out, native = layer.split(result)
        after = _named(layer, native)
        for name, part in state.items():
            _check_unchanged(name, part, after[name])
        rows = rows_first(layer, out, State(after, self.axes), x.shape[0])
        return rows, after


def _slots(module: nn.Module, weights: list[Tensor]) -> list[tuple[str, int]]:
    """Return every place in a module that holds a weight, and the number of that weight; shared ones have several."""
    number = {id(weight): place for place, weight in enumerate(weights)}
    return [
        (f"{prefix}.{name}" if prefix else name, number[id(tensor)])
        for prefix, member in module.named_modules()  # a module that is shared is named once
        for store in (member._parameters, member._buffers)
        for name, tensor in store.items()
        if tensor is not None
    ]


class StateChanges(Untraceable):
    """The state after a step is of another dtype than before it; after one plain step it may stay."""


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
