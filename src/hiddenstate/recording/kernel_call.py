"""A call of torch's fused recurrent kernels, taken apart: the one place where a layer's real work happens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from ..cells import uncompiled

_VF: Any = torch._VF

FUSED: dict[Any, str] = {
    _VF.lstm: "lstm",
    _VF.gru: "gru",
    _VF.rnn_tanh: "rnn_tanh",
    _VF.rnn_relu: "rnn_relu",
}
STEPS: dict[Any, str] = {_VF.lstm_cell: "lstm", _VF.gru_cell: "gru"}

GATES: dict[str, tuple[str, ...]] = {  # in the order of torch's weights
    "lstm": ("input", "forget", "candidate", "output"),
    "gru": ("reset", "update", "candidate"),
    "rnn_tanh": (),
    "rnn_relu": (),
}


@dataclass(frozen=True, slots=True)
class Weights:
    """The weights of one layer and direction."""

    ih: Tensor  # (gates * hidden, feature)
    hh: Tensor  # (gates * hidden, unit)
    bias_ih: Tensor | None = None  # (gates * hidden,)
    bias_hh: Tensor | None = None
    projection: Tensor | None = None  # (unit, hidden)

    @staticmethod
    def of(flat: Sequence[Tensor], bias: bool) -> Weights:
        """Name the tensors of one track, in the order in which torch lays them flat."""
        b_ih, b_hh = (flat[2], flat[3]) if bias else (None, None)
        rest = flat[4:] if bias else flat[2:]
        return Weights(flat[0], flat[1], b_ih, b_hh, rest[0] if rest else None)

    def map(self, fn: Callable[[Tensor], Tensor]) -> Weights:
        """Apply `fn` to every tensor there is."""
        parts = (self.ih, self.hh, self.bias_ih, self.bias_hh, self.projection)
        return Weights(*(None if part is None else fn(part) for part in parts))  # type: ignore[arg-type]


@dataclass(frozen=True, slots=True)
class KernelCall:
    """What `torch._VF.lstm` and its kin were called with."""

    function: Any
    kind: str
    data: Tensor  # (time, batch, feature), (batch, time, feature), or packed (rows, feature)
    batch_sizes: Tensor | None  # (time,) where packed
    state: tuple[Tensor, ...]  # each (layers * directions, batch, unit)
    flat: tuple[Tensor, ...]
    bias: bool
    layers: int
    dropout: float
    training: bool
    bidirectional: bool
    batch_first: bool

    @property
    def directions(self) -> int:
        """2 where the layer also runs backwards."""
        return 2 if self.bidirectional else 1

    def weights(self, layer: int) -> tuple[Tensor, ...]:
        """Return the flat weights of one layer, all its directions."""
        each = len(self.flat) // self.layers
        return self.flat[layer * each : (layer + 1) * each]


def parse(function: Any, args: tuple[Any, ...]) -> KernelCall | None:
    """Return the call that these arguments make, or None where they are not laid out as `nn.RNNBase` does it."""
    kind = FUSED[function]
    try:
        if isinstance(args[3], list | tuple):  # the weights: a packed call has the batch sizes before the state
            data, sizes, hx, flat, bias, layers, dropout, training, bidirectional = args
            batch_first = False
        else:
            data, hx, flat, bias, layers, dropout, training, bidirectional, batch_first = args
            sizes = None
    except (ValueError, IndexError):
        return None
    state = tuple(hx) if kind == "lstm" else (hx,)
    return KernelCall(
        function, kind, data, sizes, state, tuple(flat), bias, layers, dropout, training, bidirectional, batch_first
    )


class Intercept(TorchFunctionMode):
    """Hands calls of some torch functions to `handle(function, args)`; all else goes its way."""

    def __init__(self, functions: dict[Any, str], handle: Callable[[Any, tuple[Any, ...]], Any]) -> None:
        super().__init__()
        self._functions = functions
        self._handle = uncompiled(handle)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Do as torch would, save for the functions that are watched."""
        if kwargs or func not in self._functions:
            return func(*args, **(kwargs or {}))
        return self._handle(func, args)
