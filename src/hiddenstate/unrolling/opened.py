"""Torch's fused layers taken apart into cells, where their own kernels are slow.

On the CPU torch runs a packed sequence step by step, and its backward pass walks through all of the sequence at every
step. The same cells by a schedule take a fraction of that time.
"""

from __future__ import annotations

from typing import Any, TypeGuard
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..cells import Layer
from ..errors import Untraceable
from ..state import State
from .checks import Task
from .engines import obstacle_to
from .stacking import run_stack

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
        return run_stack(cells_of(module), task, "fast", directions=2 if module.bidirectional else 1, dropout=dropout)
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


class _Opened(nn.Module):
    """One layer and direction of a fused layer, with the very same weights."""

    weight_ih: Tensor
    weight_hh: Tensor
    weight_hr: Tensor
    bias_ih: Tensor | None
    bias_hh: Tensor | None

    def __init__(self, layer: nn.RNNBase, end: str) -> None:
        super().__init__()
        self.mode, self.projected = layer.mode, layer.proj_size > 0
        self.hidden_size, self.visible = layer.hidden_size, layer.proj_size or layer.hidden_size
        names = ("weight_ih", "weight_hh", "bias_ih", "bias_hh", "weight_hr")
        for name in names:
            self.register_parameter(name, getattr(layer, f"{name}_{end}", None))

    def initial_state(self, batch: int) -> Any:
        h, c = (self.weight_ih.new_zeros(batch, size) for size in (self.visible, self.hidden_size))
        return (h, c) if self.mode == "LSTM" else h

    def forward(self, x: Tensor, state: Any) -> Any:
        weights = (self.weight_ih, self.weight_hh, self.bias_ih, self.bias_hh)
        if self.mode == "GRU":
            return torch.gru_cell(x, state, *weights)
        if self.mode != "LSTM":
            return (torch.rnn_tanh_cell if self.mode == "RNN_TANH" else torch.rnn_relu_cell)(x, state, *weights)
        h, c = state
        gates = F.linear(x, self.weight_ih, self.bias_ih) + F.linear(h, self.weight_hh, self.bias_hh)
        i, f, g, o = gates.chunk(4, dim=-1)
        c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
        h = torch.sigmoid(o) * torch.tanh(c)
        return (F.linear(h, self.weight_hr) if self.projected else h), c


_known: WeakKeyDictionary[nn.Module, tuple[list[int], list[nn.Module]]] = WeakKeyDictionary()


def cells_of(layer: nn.RNNBase) -> list[nn.Module]:
    """Return the cells of a layer, those of each depth and direction, with the very same weights."""
    weights = [id(weight) for weight in layer.parameters()]
    known = _known.get(layer)
    if known is None or known[0] != weights:
        ends = ("", "_reverse") if layer.bidirectional else ("",)
        made: list[nn.Module] = [_Opened(layer, f"l{depth}{end}") for depth in range(layer.num_layers) for end in ends]
        known = (weights, made)
        _known[layer] = known
    return known[1]
