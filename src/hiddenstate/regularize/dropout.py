"""Dropout that drops the same units at every step of a sequence."""

from __future__ import annotations

from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import PackedSequence

from ..errors import BadInput
from ..recording import refuse_time_first

Sequences = TypeVar("Sequences", Tensor, PackedSequence)


class VariationalDropout(nn.Module):
    """Drops units of `(batch, time, unit)` in training; each sequence has one mask for all its steps.

    Kept units are scaled by 1 / (1 - p), so evaluation changes nothing. The input may be a PackedSequence; `(time,
    unit)` is a single sequence.

    >>> x = VariationalDropout(0.5)(torch.ones(2, 5, 8))
    >>> bool((x == x[:, :1]).all())
    True
    """

    def __init__(self, p: float = 0.5, *, batch_first: bool = True) -> None:
        super().__init__()
        self.p = probability(p)
        self.batch_first = batch_first

    def forward(self, x: Sequences) -> Sequences:
        """Return the sequences with whole units set to zero."""
        if not self.training or self.p == 0:
            return x
        if isinstance(x, PackedSequence):
            rows, units = int(x.batch_sizes[0]), x.data.shape[1:]
            kept = F.dropout(x.data.new_ones(rows, *units), self.p)
            row = torch.cat([torch.arange(n) for n in x.batch_sizes.tolist()]).to(x.data.device)
            return x._replace(data=x.data * kept[row])
        if x.dim() not in (2, 3):
            raise BadInput(
                f"sequences are (batch, time, unit), (time, batch, unit) with batch_first=False, or (time, unit), "
                f"but these have shape {tuple(x.shape)}."
            )
        if self.batch_first:
            refuse_time_first(x, "VariationalDropout(p, batch_first=False)")
        time = 0 if x.dim() == 2 else 1 if self.batch_first else 0
        return x * F.dropout(torch.ones_like(x.narrow(time, 0, min(1, x.shape[time]))), self.p)

    def extra_repr(self) -> str:
        """Return the probability, for printing."""
        return f"p={self.p}" + ("" if self.batch_first else ", batch_first=False")


def probability(p: float) -> float:
    """Return `p`; raise if it is not a probability."""
    if isinstance(p, bool) or not isinstance(p, int | float) or not 0 <= p <= 1:
        raise BadInput(f"p is a probability from 0 to 1, but this is {p!r}.")
    return float(p)
