"""Layers that run a whole sequence in one call: lengths and resets while keeping their kernels."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from ..cells import Layer
from ..errors import NotRecurrent
from ..state import State
from .checks import Task
from .engines import Engine
from .loop import run_steps
from .observing import placed
from .opened import run_opened
from .packing import Packing, plan

_TORCHS_OWN = (nn.RNN.forward, nn.LSTM.forward, nn.GRU.forward)


def run_fused(layer: Layer, task: Task, engine: Engine = "auto") -> tuple[Tensor, State]:
    """Run a fused layer, in one call where it is torch's own."""
    if task.plain:
        return _whole(layer, task)
    if engine != "loop" and (opened := run_opened(layer, task)) is not None:
        return opened
    if type(layer.module).forward in _TORCHS_OWN:  # one that overrides it may not bear packed sequences
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
    first = None if task.state is None and task.initial is None else _first_states(layer, task, packing)
    with placed(packing.rows, batch, starts=packing.starts):
        out, state = _call(layer, packed, first, packing.segments)
    return packing.unpack(out.data, batch, steps), state.select(packing.last)


def _first_states(layer: Layer, task: Task, packing: Packing) -> State:
    """Return what each segment starts from: its row's given state, or the initial one."""
    initial = (task.initial or layer.initial)(packing.segments)
    if task.state is None:
        return initial
    given, state = packing.continues.nonzero().squeeze(1), task.state
    alike = State({name: initial[name].to(part.dtype) for name, part in state.items()}, state.batch_axis)
    return alike.put(given.tolist(), state.select(packing.rows[given]))


def _call(layer: Layer, x: Any, state: State | None, rows: int) -> tuple[Any, State]:
    out, native = layer.call(x, None if state is None else layer.to_native(state))
    return out, layer.to_state(native, batch=rows)


class _OneStep:
    """A fused layer of the user's own as a `Cell` whose state is a `State`: one call for each step."""

    def __init__(self, layer: Layer) -> None:
        self.layer = layer
        self.axis = 1 if layer.spec.batch_first else 0

    def initial_state(self, batch: int) -> State:
        return self.layer.initial(batch)

    def __call__(self, x: Tensor, state: State) -> tuple[Tensor, State]:
        out, after = _call(self.layer, x.unsqueeze(self.axis), state, x.shape[0])
        return torch.squeeze(out, self.axis), after
