"""A piece of a step, run for all steps at once."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Any, Protocol

import torch
from torch import Tensor, fx

from .pieces import Piece

_MOST = 8  # shapes for which one piece is kept compiled


class Places(Protocol):
    """Where values are found, and put."""

    same: dict[fx.Node, Tensor]
    varying: dict[fx.Node, Tensor]
    fused: bool  # whether operations are fused, which takes long and pays for a shape that comes back


class Sweep:
    """A piece whose inputs are given for all steps, (time, ...), and whose outputs come out likewise."""

    def __init__(self, piece: Piece) -> None:
        """Sweep this piece over time."""
        self.piece = piece
        self._fused: OrderedDict[Hashable, Callable[..., Any]] = OrderedDict()

    def __call__(self, places: Places) -> None:
        """Read the inputs, and put the outputs beside them."""
        if not self.piece.outputs:
            return
        fixed = places.same
        values = [fixed[node] if node in fixed else places.varying[node] for node in self.piece.inputs]
        axes = tuple(None if node in fixed else 0 for node in self.piece.inputs)
        results = self._call(axes, values, places.fused)(*values)
        places.varying.update(zip(self.piece.outputs, results, strict=True))

    def _call(self, axes: tuple[int | None, ...], values: list[Tensor], fused: bool) -> Callable[..., Any]:
        every = _quietly(torch.vmap(self.piece.call, in_dims=axes))
        if not fused:
            return every
        key = tuple(value.shape for value in values)
        if key not in self._fused:
            from torch.fx.experimental.proxy_tensor import make_fx

            traced = make_fx(every, tracing_mode="fake")(*values)
            self._fused[key] = torch.compile(traced, dynamic=False)
            while len(self._fused) > _MOST:
                self._fused.popitem(last=False)
        return self._fused[key]


def _quietly(function: Callable[..., Any]) -> Callable[..., Any]:
    # An operation without a rule for all steps at once is run for one after the other: slower, not wrong. Torch warns
    # of it, in a backward pass later than any filter of warnings could catch it.
    flags: Any = torch._C._functorch

    def called(*values: Tensor) -> Any:
        flags._set_vmap_fallback_warning_enabled(False)
        try:
            return function(*values)
        finally:
            flags._set_vmap_fallback_warning_enabled(True)

    return called
