"""Running a piece of a step for all steps at once."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Any, Protocol

import torch
from torch import Tensor, fx

from .native import own_products, product
from .pieces import Piece
from .reading import TRACING

_MOST = 8  # shapes for which one piece is kept traced or compiled
_AFTER = 2  # calls of one shape before it is traced


class SweptValues(Protocol):
    """Where values are found, and put."""

    same: dict[fx.Node, Tensor]
    varying: dict[fx.Node, Tensor]
    fused: bool  # whether operations are fused, which takes long and pays for a shape that comes back


class Sweep:
    """A piece whose inputs are given for all steps, (time, ...), and whose outputs come out likewise."""

    def __init__(self, piece: Piece) -> None:
        """Sweep this piece over time."""
        self.piece = piece
        self._made: OrderedDict[Hashable, Callable[..., Any]] = OrderedDict()
        self._calls: OrderedDict[Hashable, int] = OrderedDict()

    def __call__(self, places: SweptValues, *, own_products: bool = False) -> None:
        """Read the inputs, and put the outputs beside them; large products by our own code where that is asked for."""
        if not self.piece.outputs:
            return
        fixed = places.same
        values = [fixed[node] if node in fixed else places.varying[node] for node in self.piece.inputs]
        axes = tuple(None if node in fixed else 0 for node in self.piece.inputs)
        key = (
            places.fused,
            own_products,
            *((value.shape, value.stride(), value.dtype, value.device) for value in values),
        )
        call = self._made.get(key) or self._call(key, axes, values, places.fused, own_products)
        results = call(*values)
        places.varying.update(zip(self.piece.outputs, results, strict=True))

    def _call(
        self, key: Hashable, axes: tuple[int | None, ...], values: list[Tensor], fused: bool, own_products: bool
    ) -> Callable[..., Any]:
        every = _quietly(torch.vmap(self.piece.call, in_dims=axes))
        if not fused and not self._comes_back(key):
            return _by_own_products(every) if own_products else every
        made = self._made[key] = _traced(every, values, fused=fused, own_products=own_products)
        while len(self._made) > _MOST:
            self._made.popitem(last=False)
        return made

    def _comes_back(self, key: Hashable) -> bool:
        """Say whether a shape was seen often enough to be worth a trace, which runs in a fraction of vmap's time."""
        self._calls[key] = self._calls.get(key, 0) + 1
        self._calls.move_to_end(key)
        while len(self._calls) > 4 * _MOST:
            self._calls.popitem(last=False)
        return self._calls[key] > _AFTER


def _traced(every: Callable[..., Any], values: list[Tensor], *, fused: bool, own_products: bool) -> Callable[..., Any]:
    from torch.fx.experimental.proxy_tensor import make_fx

    try:
        with TRACING:
            made = make_fx(every, tracing_mode="fake")(*values)
    except Exception:  # some operations have no rule for all steps at once, and need their numbers
        if fused:
            raise
        return _by_own_products(every) if own_products else every
    if own_products:
        for node in made.graph.nodes:
            if node.target is torch.ops.aten.mm.default:
                node.target = product
        made.recompile()
    forward: Callable[..., Any] = torch.compile(made, dynamic=False) if fused else made.forward
    return forward


def _by_own_products(every: Callable[..., Any]) -> Callable[..., Any]:
    def called(*values: Tensor) -> Any:
        with own_products():
            return every(*values)

    return called


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
