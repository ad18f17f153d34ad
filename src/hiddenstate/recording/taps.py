"""`tap`: a cell names an intermediate for the recorder, and never needs to know whether one is there."""

from __future__ import annotations

import threading
from typing import TypeVar

from torch import Tensor

from ..errors import BadInput

_T = TypeVar("_T")


class _Open(threading.local):
    """The taps of the cell steps that are under way in this thread, innermost last."""

    def __init__(self) -> None:
        self.steps: list[dict[str, Tensor] | None] = []


_open = _Open()


def tap(name: str, value: _T) -> _T:
    """Return `value` as it is, and let a recording of the cell under way keep it as the gate `name`.

    Outside a recording with `gates=True` it does nothing at all.

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
    if _open.steps and _open.steps[-1] is not None:
        if not isinstance(value, Tensor):
            raise BadInput(f"hs.tap({name!r}, ...) was given {type(value).__name__}, but a tensor is needed.")
        _open.steps[-1][name] = value.detach().clone()  # as it is here, whatever the cell does to it next
    return value


def open_step(listening: bool) -> None:
    """Begin a cell's step; taps inside it are kept only where somebody listens."""
    _open.steps.append({} if listening else None)


def close_step() -> dict[str, Tensor]:
    """End the innermost step and return what was tapped in it."""
    return (_open.steps.pop() if _open.steps else None) or {}
