"""The dimension of states: in how many directions they vary."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from ..errors import BadInput
from ..state import shown_in_short
from .series import ManyStates, pieces, refuse_bad

_STATES_PER_UNIT = 10  # with so many states, a full ball is measured with an error below a tenth


@shown_in_short
@dataclass(frozen=True, slots=True, eq=False)
class Dimension:
    """The participation ratio of the states' covariance, and its eigenvalues."""

    value: float  # (Σ λ)² / Σ λ²: 1 for a line, `unit` for a ball
    spectrum: Tensor  # (unit,) eigenvalues of the covariance, falling
    states: int  # the number of states measured

    def __str__(self) -> str:
        """Return one line."""
        shares = self.spectrum.cumsum(0) / self.spectrum.sum()
        needed = int((shares < 0.9).sum()) + 1 if self.value else 0
        return (
            f"{self.value:.2f} of {len(self.spectrum)} dimensions (participation ratio); "
            f"{needed} hold 90% of the variance{self._limit()}"
        )

    def _limit(self) -> str:
        """Return a warning if there are too few states to fill the dimensions that they may have."""
        units = len(self.spectrum)
        if units < 2 or self.states >= _STATES_PER_UNIT * units:
            return ""
        ball = units * (self.states - 1) / (units + self.states)  # the mean result for that many states of a full ball
        return (
            f"; a lower bound, since {self.states:,} states of a full ball would show {ball:.1f}: measure more of them"
        )


def dimension(traj: ManyStates, *, lengths: Tensor | None = None, part: str = "h") -> Dimension:
    """Return the participation ratio of all real states: 1 on a line, the number of units in a ball; 0 at one point.

    A few states cannot fill many dimensions: with fewer than ten states per unit, the result says what they could show.

    Many runs of unequal length, `recording.runs("l0")` or an iterator of them, are measured one at a time, as one.

    >>> line = torch.linspace(0, 1, 30).reshape(1, 30, 1) * torch.ones(3)
    >>> print(dimension(line))
    1.00 of 3 dimensions (participation ratio); 1 hold 90% of the variance
    """
    count, largest, middle, factor = 0, 0.0, None, torch.zeros(0)
    for series in pieces(traj, lengths, part=part):
        entries = refuse_bad(series).entries.double()
        new, mean = len(entries), entries.mean(0)
        moved = entries - mean
        if middle is None:
            middle, factor = mean, moved
        else:  # the difference between the two means counts as well
            between = (mean - middle) * math.sqrt(count * new / (count + new))
            factor = torch.cat([factor, moved, between.unsqueeze(0)])
            middle = middle + (mean - middle) * (new / (count + new))
        if len(factor) > factor.shape[1]:  # its triangular factor has the same singular values and a bounded size
            factor = torch.linalg.qr(factor, mode="r").R
        count, largest, dtype = count + new, max(largest, float(entries.abs().amax())), series.values.dtype
    if count < 2:
        raise BadInput("one state alone has no dimension: two or more steps or rows are needed.")
    found = torch.linalg.svdvals(factor) ** 2 / (count - 1)  # (min(entry, unit),) falling
    # Smaller values are rounding of the mean, which would make identical states seem to vary.
    found = found.where(found > (largest * torch.finfo(dtype).eps) ** 2, 0)
    spectrum = found.new_zeros(factor.shape[1])
    spectrum[: len(found)] = found[: len(spectrum)]
    square = float((spectrum**2).sum())
    return Dimension(float(spectrum.sum()) ** 2 / square if square else 0.0, spectrum.to(dtype), count)
