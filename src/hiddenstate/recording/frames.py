"""The calls of recorded layers that are under way, and what is noted in them: kernel calls and tapped values."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ..cells import uncompiled
from ..errors import BadInput
from .recording import Options

_T = TypeVar("_T")
_VF: Any = torch._VF

FUSED: dict[Any, str] = {  # torch's functions that run whole sequences, with the kind of layer that calls each
    _VF.lstm: "lstm",
    _VF.gru: "gru",
    _VF.rnn_tanh: "rnn_tanh",
    _VF.rnn_relu: "rnn_relu",
}
CELL_STEPS: dict[Any, str] = {_VF.lstm_cell: "lstm", _VF.gru_cell: "gru"}

GATES: dict[str, tuple[str, ...]] = {  # in the order of torch's weights
    "lstm": ("input", "forget", "candidate", "output"),
    "gru": ("reset", "update", "candidate"),
    "rnn_tanh": (),
    "rnn_relu": (),
}


@dataclass(slots=True, eq=False)
class Frame:
    """One call of a layer, as seen by one recording."""

    module: nn.Module
    options: Options  # what to record of this call
    notes: list[Any] = field(default_factory=list)  # of the kernels in the call, written by the intercepting function
    taps: dict[str, Tensor] = field(default_factory=dict)  # the latest value that the cell gave each name with hs.tap


class _FrameStack(threading.local):
    """The frames of each thread. They nest, since a layer's call may call other layers."""

    def __init__(self) -> None:
        self.frames: list[Frame] = []  # the innermost comes last


_stack = _FrameStack()


def innermost() -> list[Frame]:
    """Return the frames of the innermost call: one for each recording that hears it."""
    frames = _stack.frames
    return [frame for frame in frames if frame.module is frames[-1].module] if frames else []


def run_in(frame: Frame, run: Callable[[], Any], intercept: Intercept | None = None) -> Any:
    """Return `run()`; during it, `frame` is on the stack and calls of kernels go to `intercept`.

    If several recordings hear one call, the outermost one intercepts for all and finds their frames with `innermost`.
    """
    frames = _stack.frames
    alone = not frames or frames[-1].module is not frame.module
    frames.append(frame)
    try:
        if intercept is None or not alone:
            return run()
        with intercept:
            return run()
    finally:
        frames.pop()


def tap(name: str, value: _T) -> _T:
    """Return `value` unchanged, and let a recording of the cell that is running keep it as the gate `name`.

    Outside a recording with `gates=True`, this does nothing.

    >>> class Leaky(torch.nn.Module):
    ...     hidden_size = 2
    ...     def forward(self, x, h):
    ...         keep = hs.tap("keep", torch.sigmoid(x))
    ...         return keep * h + (1 - keep) * x
    >>> cell = Leaky()
    >>> with hs.record(cell, gates=True) as rec:
    ...     _ = cell(torch.zeros(1, 2), torch.ones(1, 2))
    >>> rec["l0"].gates["keep"]
    tensor([[[0.5000, 0.5000]]])
    """
    frames = [frame for frame in innermost() if frame.options.gates]
    if frames:
        if not isinstance(value, Tensor):
            raise BadInput(f"hs.tap({name!r}, ...) was given {type(value).__name__}, but a tensor is needed.")
        kept = value.detach().clone()  # a copy: the cell may change the tensor in place afterwards
        for frame in frames:
            frame.taps[name] = kept
    return value


class Intercept(TorchFunctionMode):
    """Passes calls of certain torch functions to `handle(function, args)`, and all others to torch."""

    def __init__(self, functions: dict[Any, str], handle: Callable[[Any, tuple[Any, ...]], Any]) -> None:
        super().__init__()
        self._functions = functions
        self._handle = uncompiled(handle)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call the handler for the functions it handles, and torch's function otherwise."""
        if kwargs or func not in self._functions:
            return func(*args, **(kwargs or {}))
        return self._handle(func, args)


@dataclass(frozen=True, slots=True)
class TrackWeights:
    """The weights of one layer and direction."""

    ih: Tensor  # (gates * hidden, feature)
    hh: Tensor  # (gates * hidden, unit)
    bias_ih: Tensor | None = None  # (gates * hidden,)
    bias_hh: Tensor | None = None
    projection: Tensor | None = None  # (unit, hidden)

    @staticmethod
    def of(flat: Sequence[Tensor], bias: bool) -> TrackWeights:
        """Name the tensors of one track, given in the order of torch's flat weights."""
        b_ih, b_hh = (flat[2], flat[3]) if bias else (None, None)
        rest = flat[4:] if bias else flat[2:]
        return TrackWeights(flat[0], flat[1], b_ih, b_hh, rest[0] if rest else None)

    def map(self, fn: Callable[[Tensor], Tensor]) -> TrackWeights:
        """Apply `fn` to each tensor that is present."""
        parts = (self.ih, self.hh, self.bias_ih, self.bias_hh, self.projection)
        return TrackWeights(*(None if part is None else fn(part) for part in parts))  # type: ignore[arg-type]


@dataclass(frozen=True, slots=True)
class KernelCall:
    """The arguments of a call of one of the `FUSED` functions, by name."""

    function: Any
    kind: str
    data: Tensor  # (time, batch, feature), (batch, time, feature), or packed (rows, feature)
    batch_sizes: Tensor | None  # (time,) if packed
    state: tuple[Tensor, ...]  # each (layers * directions, batch, unit)
    flat: tuple[Tensor, ...]  # the weights of all layers and directions
    bias: bool
    layers: int
    dropout: float
    training: bool
    bidirectional: bool
    batch_first: bool

    @property
    def directions(self) -> int:
        """2 if the layer also runs backwards, else 1."""
        return 2 if self.bidirectional else 1

    def weights(self, layer: int) -> tuple[Tensor, ...]:
        """Return the flat weights of one layer, for all its directions."""
        each = len(self.flat) // self.layers
        return self.flat[layer * each : (layer + 1) * each]


def parse(function: Any, args: tuple[Any, ...]) -> KernelCall | None:
    """Name the arguments of a fused function; return None if they are not in the order that `nn.RNNBase` uses."""
    kind = FUSED[function]
    try:
        if isinstance(args[3], list | tuple):  # the weights: a packed call has batch sizes before the state
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
