"""Layers that run a whole sequence in one call: lengths and resets without leaving their kernels."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from ..cells import Layer
from ..errors import NotRecurrent
from ..state import State
from .checks import Task
from .loop import run_steps
from .packing import Packing, plan


def run_fused(layer: Layer, task: Task) -> tuple[Tensor, State]:
    """Run a fused layer, in one call where it is torch's own."""
    if task.plain:
        return _whole(layer, task)
    if isinstance(layer.module, nn.RNNBase):
        return _packed(layer, task)
    if layer.spec.directions == 2:
        raise NotRecurrent(
            f"{type(layer.module).__name__} runs in both directions and is no layer of torch's own, so lengths "
            f"cannot be kept from outside it. Run rows of one length at a time, or use hs.Recurrent."
        )
    return run_steps(_OneStep(layer), task)


def _whole(layer: Layer, task: Task) -> tuple[Tensor, State]:
    batch_first = layer.spec.batch_first
    out, state = _call(layer, task.x if batch_first else task.x.transpose(0, 1), task.state, task.x.shape[0])
    return (out if batch_first else out.transpose(0, 1)), state


def _packed(layer: Layer, task: Task) -> tuple[Tensor, State]:
    batch, steps = task.x.shape[:2]
    packing = plan(task)
    packed = PackedSequence(packing.pack(task.x), packing.batch_sizes)
    first = None if task.state is None else _first_states(task.state, packing)
    out, state = _call(layer, packed, first, packing.segments)
    return packing.unpack(out.data, batch, steps), state.select(packing.last)


def _first_states(state: State, packing: Packing) -> State:
    # Torch's own layers start from zeros, so a segment that starts anew does too.
    given = packing.continues.nonzero().squeeze(1)
    rows = packing.rows[given]

    def spread(name: str, part: Tensor) -> Tensor:
        axis = state.batch_axis[name]
        shape = list(part.shape)
        shape[axis] = packing.segments
        kept = part.index_select(axis, rows.to(part.device))
        return part.new_zeros(shape).index_copy(axis, given.to(part.device), kept)

    return State({name: spread(name, part) for name, part in state.items()}, state.batch_axis)


def _call(layer: Layer, x: Any, state: State | None, rows: int) -> tuple[Any, State]:
    # Without a state the argument is left out: whoever hooks the layer may want to give one.
    args = (x,) if state is None else (x, layer.to_native(state))
    out, native = layer.split(layer.module(*args))
    return out, layer.to_state(native, batch=rows)


class _OneStep:
    """A fused layer of the user's own, run as a cell: one call for each step."""

    def __init__(self, layer: Layer) -> None:
        self.layer = layer
        self.axis = 1 if layer.spec.batch_first else 0

    def initial(self, batch: int) -> State:
        return self.layer.initial(batch)

    def step(self, x: Tensor, state: State) -> tuple[Tensor, State]:
        out, after = _call(self.layer, x.unsqueeze(self.axis), state, x.shape[0])
        return torch.squeeze(out, self.axis), after
