"""The last real step of each row."""

from __future__ import annotations

import torch
from torch import Tensor

from ..errors import BadInput
from .pool import Pool
from .steps import Lengths, Source, Steps, read_steps, traced


class Last(Pool):
    """Each row's last real step, (batch, unit).

    With `bidirectional=True`, the second half of the units comes from a layer that reads backwards. Its last step is
    step 0, so the result joins the forward half's last step with the backward half's first.

    >>> h = torch.arange(6.0).reshape(1, 3, 2)
    >>> Last()(h, [2])
    tensor([[2., 3.]])
    >>> Last(bidirectional=True)(h, [2])
    tensor([[2., 1.]])
    """

    def __init__(self, bidirectional: bool = False) -> None:
        super().__init__()
        self.bidirectional = bidirectional

    def forward(self, h: Source, lengths: Lengths | None = None) -> Tensor:
        """Return the last steps."""
        return self.pool(read_steps(h, lengths))

    def pool(self, steps: Steps) -> Tensor:
        """Return the last steps."""
        last = _last(steps)
        if not self.bidirectional:
            return last
        units = steps.h.shape[-1]
        if not traced() and units % 2:
            raise BadInput(
                f"the states have {units} units, but a bidirectional layer gives an even number, half of them for "
                f"each direction. For a layer of one direction use Last()."
            )
        return torch.cat([last[:, : units // 2], steps.h[:, 0, units // 2 :]], dim=-1)

    def extra_repr(self) -> str:
        """Return `bidirectional=True` if it is set, for printing."""
        return "bidirectional=True" if self.bidirectional else ""


def _last(steps: Steps) -> Tensor:
    if steps.lengths is None:
        return steps.h[:, -1]
    return at_steps(steps.h, (steps.lengths - 1).unsqueeze(1)).squeeze(1)


def at_steps(h: Tensor, index: Tensor) -> Tensor:
    """Return for each row of `h (batch, time, unit)` its own steps `index (batch, taps)`: (batch, taps, unit)."""
    return h.gather(1, index.unsqueeze(-1).expand(-1, -1, h.shape[-1]))
