"""One track along time: what a recording is made of, and what measures, heads and plots take."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ..errors import BadInput
from ..state import State


@dataclass(frozen=True, slots=True, eq=False)
class Trajectory:
    """One track at every step, with the true length of each sequence; padding is zero.

    >>> walk = Trajectory(torch.randn(2, 5, 3), torch.tensor([5, 3]))
    >>> walk.valid.sum(1)
    tensor([5, 3])
    """

    h: Tensor  # (batch, time, unit); for a cell without a part named h, its first part
    lengths: Tensor | None = None  # (batch,) int64; None means that every row has all steps
    c: Tensor | None = None  # (batch, time, unit)
    gates: Mapping[str, Tensor] = field(default_factory=dict)  # name -> (batch, time, unit)
    grads: Mapping[str, Tensor] = field(default_factory=dict)  # part -> (batch, time, unit), dL/d of that state
    others: Mapping[str, Tensor] = field(default_factory=dict)  # further parts of a custom cell's state
    initial: State | None = None  # the state before the first step
    track: str = ""
    kind: str = ""  # the layer's kind: lstm, gru, rnn, lstm_cell, cell, …
    every: int = 1  # the steps kept are 0, every, 2 * every, …

    def __post_init__(self) -> None:
        """Check that all parts agree, and fill in lengths where none were given."""
        if self.h.dim() != 3:
            raise BadInput(
                f"a trajectory is (batch, time, unit), but h has shape {tuple(self.h.shape)}. "
                f"One sequence without a batch axis becomes one with h.unsqueeze(0)."
            )
        batch, time, _ = self.h.shape
        if self.lengths is None:
            object.__setattr__(self, "lengths", torch.full((batch,), time, dtype=torch.int64, device=self.h.device))
        assert self.lengths is not None
        if self.lengths.shape != (batch,):
            raise BadInput(f"lengths have shape {tuple(self.lengths.shape)}, but h has {batch} rows: one length for each.")
        if batch and not 0 <= int(self.lengths.min()) <= int(self.lengths.max()) <= time:
            raise BadInput(
                f"lengths go from {int(self.lengths.min())} to {int(self.lengths.max())}, but h has {time} steps."
            )

    @property
    def valid(self) -> Tensor:
        """Which steps are real: bool (batch, time)."""
        assert self.lengths is not None
        return torch.arange(self.h.shape[1], device=self.h.device) < self.lengths.to(self.h.device).unsqueeze(1)

    @property
    def states(self) -> dict[str, Tensor]:
        """All parts of the state by name, each (batch, time, unit)."""
        return {"h": self.h, **({"c": self.c} if self.c is not None else {}), **self.others}

    @property
    def nbytes(self) -> int:
        """The bytes of all values."""
        named = [*self.states.values(), *self.gates.values(), *self.grads.values()]
        return sum(value.numel() * value.element_size() for value in named)
