"""`tap`: a cell names an intermediate for the recorder, and never needs to know whether one is there."""

from __future__ import annotations

from typing import TypeVar

from torch import Tensor

from ..errors import BadInput
from .frames import innermost

_T = TypeVar("_T")


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
    frames = [frame for frame in innermost() if frame.gates]
    if frames:
        if not isinstance(value, Tensor):
            raise BadInput(f"hs.tap({name!r}, ...) was given {type(value).__name__}, but a tensor is needed.")
        kept = value.detach().clone()  # as it is here, whatever the cell does to it next
        for frame in frames:
            frame.taps[name] = kept
    return value
