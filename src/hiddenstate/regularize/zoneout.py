"""Zoneout: a cell whose units randomly keep their last value."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from ..cells import as_layer, state_before_output
from ..errors import BadInput, NotRecurrent
from .dropout import probability

Native: TypeAlias = Any  # a tensor, or a nested tuple, list or dict of tensors


class Zoneout(nn.Module):
    """Wraps `cell` so that in training each unit of the state keeps its last value with probability p.

    In evaluation, each unit is p times its last value plus 1 - p times its next one. `p` is one number, or one for each
    part of the state by name: `{"h": 0.05, "c": 0.5}`. The wrapper is called as the cell is, and replaces it in
    `hs.unroll` and in a loop of your own.

    >>> cell = Zoneout(nn.GRUCell(3, 4), 0.1)
    >>> cell(torch.randn(2, 3), cell.initial_state(2)).shape
    torch.Size([2, 4])
    """

    def __init__(self, cell: nn.Module, p: float | Mapping[str, float] = 0.1) -> None:
        super().__init__()
        self.cell = cell
        layer = as_layer(cell)
        if layer.fused:
            raise NotRecurrent(
                f"Zoneout takes a cell of one step, but {type(cell).__name__} runs whole sequences, and its kernel "
                f"lets nobody in between. Use the cell of its kind, such as nn.LSTMCell, with hs.unroll."
            )
        self._place = 0 if state_before_output(cell) else 1  # index of the state in a result with an output
        self.p = {name: probability(each) for name, each in p.items()} if isinstance(p, Mapping) else probability(p)

    @property
    def hidden_size(self) -> int:
        """The cell's own."""
        return self._own("hidden_size")

    @property
    def input_size(self) -> int:
        """The cell's own."""
        return self._own("input_size")

    def initial_state(self, batch: int) -> Native:
        """Return the state that the cell itself starts from."""
        layer = as_layer(self.cell)
        return layer.to_native(layer.initial(batch))

    def forward(self, x: Tensor, state: Native | None = None) -> Native:
        """Return the cell's result, with its next state mixed with the last one."""
        if state is None:
            layer = as_layer(self.cell, x)
            rows, batched = layer.rows((x,), {})
            state = layer.to_native(layer.initial(rows), batched=batched)
        result = self.cell(x, state)
        if _same_nesting(state, result):
            return self._mixed(state, result)
        output, new = _taken_apart(result, state, self.cell, self._place)
        mixed = self._mixed(state, new)
        # If the output is the new state itself, it must be the mixed state.
        return _in_place_of(output, new, mixed), mixed

    def extra_repr(self) -> str:
        """Return the probabilities, for printing."""
        return f"p={self.p}"

    def _own(self, name: str) -> int:
        size = getattr(self.cell, name, None)
        if not isinstance(size, int):
            raise AttributeError(f"{type(self.cell).__name__} has no {name}")
        return size

    def _mixed(self, old: Native, new: Native) -> Native:
        names = iter(_names(new))
        return _map(lambda last, following: self._mix(last, following, next(names)), old, new)

    def _mix(self, last: Tensor, following: Tensor, name: str) -> Tensor:
        p = self._p(name)
        if p == 0 or not following.is_floating_point():
            return following
        if not self.training:
            return torch.lerp(following, last.to(following.dtype), p)
        return torch.where(torch.rand_like(following) < p, last.to(following.dtype), following)

    def _p(self, name: str) -> float:
        if isinstance(self.p, float):
            return self.p
        if name not in self.p:
            raise BadInput(f"p is given for {', '.join(self.p)}, but the state has a part {name!r}: give it one, or 0.")
        return self.p[name]


def _same_nesting(one: Native, other: Native) -> bool:
    if isinstance(one, Tensor) or isinstance(other, Tensor):
        return isinstance(one, Tensor) and isinstance(other, Tensor)
    if isinstance(one, dict):
        keys = isinstance(other, dict) and one.keys() == other.keys()
        return keys and all(_same_nesting(part, other[key]) for key, part in one.items())
    return (
        isinstance(one, tuple | list)
        and isinstance(other, tuple | list)
        and len(one) == len(other)
        and all(map(_same_nesting, one, other))
    )


def _taken_apart(result: Any, state: Native, cell: nn.Module, place: int) -> tuple[Any, Native]:
    if isinstance(result, tuple | list) and len(result) == 2 and _same_nesting(state, result[place]):
        return result[1 - place], result[place]
    raise NotRecurrent(
        f"{type(cell).__name__} returned neither a state nested like the one it was given, nor (output, state): "
        f"Zoneout cannot tell which value each unit would keep."
    )


def _map(fn: Callable[[Tensor, Tensor], Tensor], one: Native, other: Native) -> Native:
    """Apply `fn` to the tensors of two equal nestings in pairs; the result is nested like `other`."""
    if isinstance(other, Tensor):
        return fn(one, other)
    if isinstance(other, dict):
        return {key: _map(fn, one[key], inner) for key, inner in other.items()}
    items = [_map(fn, first, second) for first, second in zip(one, other, strict=True)]
    return type(other)(*items) if hasattr(other, "_fields") else type(other)(items)


def _names(state: Native, path: str = "") -> list[str]:
    """Return the names of a state's parts as `hs.layers` gives them: h and c, or their places and keys."""
    if isinstance(state, Tensor):
        return [path or "h"]
    if not path and not isinstance(state, dict) and len(state) == 2 and all(isinstance(part, Tensor) for part in state):
        return ["h", "c"]
    inner = state.items() if isinstance(state, dict) else enumerate(state)
    return [name for key, part in inner for name in _names(part, f"{path}.{key}" if path else str(key))]


def _in_place_of(output: Any, new: Native, mixed: Native) -> Any:
    found: list[Tensor] = []

    def look(before: Tensor, after: Tensor) -> Tensor:
        if output is before:
            found.append(after)
        return after

    _map(look, new, mixed)
    return found[0] if found else output
