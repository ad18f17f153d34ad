"""Torch's fused layers taken apart into cells, where their own kernels are slow.

On the CPU torch runs a packed sequence step by step, and its backward pass walks through all of the sequence at every
step. The same cells by a schedule take a fraction of that time.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeGuard
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..cells import Layer, unheard
from ..errors import Untraceable
from ..state import State
from .checks import Task
from .engines import layer_for, obstacle_to, run_cell
from .precision import is_exact
from .stacking import run_stack

if TYPE_CHECKING:
    from .schedule import Schedule
    from .step import Step

_MOST = 32  # kinds of calls that a cell's schedules are remembered for
_WORTH = 2**20  # numbers in a layer's outputs from which on a schedule is worth its making


def run_opened(layer: Layer, task: Task) -> tuple[Tensor, State] | None:
    """Run a fused layer's cells by schedules; None where its own kernel should run."""
    module = layer.module
    if not is_torchs_own(module) or why_closed(module) is not None:
        return None
    work = task.x.shape[0] * task.x.shape[1] * module.hidden_size
    if task.x.device.type != "cpu" or work < _WORTH or torch.is_autocast_enabled("cpu"):
        return None
    if obstacle_to(layer, task) or task.x.dtype not in (torch.float32, torch.float64):
        return None
    dropout = module.dropout if module.training else 0.0
    try:
        return run_cells(module, task, dropout=dropout)
    except Untraceable:
        return None


def is_torchs_own(module: nn.Module) -> TypeGuard[nn.RNNBase]:
    """Say whether a module is one of torch's fused layers, and no subclass that may do things of its own."""
    return type(module) in (nn.RNN, nn.LSTM, nn.GRU)


def why_closed(layer: nn.RNNBase) -> str | None:
    """Return why a layer's kernel may run on other weights than its parameters; None where it runs on these."""
    names, lent = getattr(layer, "_flat_weights_names", None), getattr(layer, "_flat_weights", None)
    if names is None or lent is None:
        return "this version of torch does not say which weights its kernel takes"
    own = [layer._parameters.get(name) for name in names]
    if any(weight is not mine for weight, mine in zip(lent, own, strict=True)):
        return "its kernel is lent other weights than its parameters, as by WeightDrop"
    return None


def run_cells(
    layer: nn.RNNBase,
    task: Task,
    *,
    dropout: float | Callable[[Tensor], Tensor] | None,
    dtype: torch.dtype | None = None,
) -> tuple[Tensor, State]:
    """Run the cells of a layer by schedules, with its weights cast to a dtype where one is given."""
    directions = 2 if layer.bidirectional else 1
    return run_stack(cells_of(layer, dtype), task, _run_opened_cell, directions=directions, dropout=dropout)


def _run_opened_cell(cell: nn.Module, task: Task) -> tuple[Tensor, State]:
    """Run a cell of ours by its schedule, without reading it again where nothing but its weights may have changed."""
    assert isinstance(cell, _Opened)
    if task.resets is not None:
        return run_cell(layer_for(cell, task.x), task, "fast")
    # All of the fast engine, which a plain import can do without.
    from .fast import execute, lay_out
    from .scheduled import scheduled_for

    kind = _kind(cell, task)
    known = cell.known.get(kind)
    if known is None:
        layer = layer_for(cell, task.x)
        result = run_cell(layer, task, "fast")
        made = scheduled_for(layer, task)
        if made is not None:
            cell.known[kind] = made
            while len(cell.known) > _MOST:
                cell.known.pop(next(iter(cell.known)))
        return result
    schedule, step = known
    state = cell.zeros(step.axes, task.x.shape[0]) if task.state is None else task.state
    with unheard():
        return execute(schedule, lay_out(step, replace(task, state=state)))


def _kind(cell: _Opened, task: Task) -> Hashable:
    """Return all that a schedule of a cell of ours depends on."""
    x, grad = task.x, torch.is_grad_enabled()
    weights = [weight for weight in cell._parameters.values() if weight is not None]
    tensors = [x, *weights, *(() if task.state is None else task.state.values())]
    return (
        x.shape[:1] + x.shape[2:],
        (grad, task.lengths is None, task.state is None, is_exact(), torch.get_float32_matmul_precision()),
        tuple((tensor.dtype, tensor.device, grad and tensor.requires_grad) for tensor in tensors),
        tuple(weight.shape for weight in weights),
    )


class _Opened(nn.Module):
    """One layer and direction of a fused layer, with the very same weights, or these in another dtype."""

    weight_ih: Tensor
    weight_hh: Tensor
    weight_hr: Tensor
    bias_ih: Tensor | None
    bias_hh: Tensor | None

    def __init__(self, layer: nn.RNNBase, end: str, dtype: torch.dtype | None) -> None:
        super().__init__()
        self.dtype = dtype
        self.known: dict[Hashable, tuple[Schedule, Step]] = {}
        self.mode, self.projected = layer.mode, layer.proj_size > 0
        self.hidden_size, self.visible = layer.hidden_size, layer.proj_size or layer.hidden_size
        names = ("weight_ih", "weight_hh", "bias_ih", "bias_hh", "weight_hr")
        for name in names:
            self.register_parameter(name, getattr(layer, f"{name}_{end}", None))

    def initial_state(self, batch: int) -> Any:
        sizes = (self.visible, self.hidden_size)
        h, c = (self.weight_ih.new_zeros(batch, size, dtype=self.dtype) for size in sizes)
        return (h, c) if self.mode == "LSTM" else h

    def zeros(self, axes: dict[str, int], batch: int) -> State:
        """Return the initial state by its names."""
        first = self.initial_state(batch)
        return State(dict(zip(axes, first if self.mode == "LSTM" else (first,), strict=True)), axes)

    def forward(self, x: Tensor, state: Any) -> Any:
        named: list[Any] = [self.weight_ih, self.weight_hh, self.bias_ih, self.bias_hh, self.weight_hr]
        if self.dtype is not None:
            named = [None if weight is None else weight.to(self.dtype) for weight in named]
        *weights, down = named
        if self.mode == "GRU":
            return torch.gru_cell(x, state, *weights)
        if self.mode != "LSTM":
            return (torch.rnn_tanh_cell if self.mode == "RNN_TANH" else torch.rnn_relu_cell)(x, state, *weights)
        h, c = state
        gates = F.linear(x, weights[0], weights[2]) + F.linear(h, weights[1], weights[3])
        i, f, g, o = gates.chunk(4, dim=-1)
        c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
        h = torch.sigmoid(o) * torch.tanh(c)
        return (F.linear(h, down) if self.projected else h), c


_known: WeakKeyDictionary[nn.Module, dict[torch.dtype | None, tuple[list[int], list[nn.Module]]]] = WeakKeyDictionary()


def cells_of(layer: nn.RNNBase, dtype: torch.dtype | None = None) -> list[nn.Module]:
    """Return the cells of a layer, those of each depth and direction, with its own weights, cast to a dtype or not."""
    weights = [id(weight) for weight in layer._parameters.values()]
    kinds = _known.setdefault(layer, {})
    known = kinds.get(dtype)
    if known is None or known[0] != weights:
        ends = ("", "_reverse") if layer.bidirectional else ("",)
        made: list[nn.Module] = [
            _Opened(layer, f"l{depth}{end}", dtype) for depth in range(layer.num_layers) for end in ends
        ]
        known = kinds[dtype] = (weights, made)
    return known[1]
