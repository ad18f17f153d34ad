"""In how many directions states really vary."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..errors import BadInput
from ..recording import Trajectory
from .series import as_series, refuse_bad


@dataclass(frozen=True, slots=True, eq=False)
class Dimension:
    """The participation ratio of the states' covariance, and its eigenvalues."""

    value: float  # (Σ λ)² / Σ λ²: 1 for a line, `unit` for a ball
    spectrum: Tensor  # (unit,) eigenvalues of the covariance, falling

    def __str__(self) -> str:
        """Return one line."""
        shares = self.spectrum.cumsum(0) / self.spectrum.sum()
        needed = int((shares < 0.9).sum()) + 1 if self.value else 0
        return (
            f"{self.value:.2f} of {len(self.spectrum)} dimensions (participation ratio); "
            f"{needed} hold 90% of the variance"
        )


def dimension(traj: Trajectory | Tensor, *, lengths: Tensor | None = None, part: str = "h") -> Dimension:
    """Return the participation ratio of all real states: 1 on a line, the number of units in a ball; 0 at one point.

    >>> line = torch.linspace(0, 1, 20).reshape(1, 20, 1) * torch.ones(3)
    >>> print(dimension(line))
    1.00 of 3 dimensions (participation ratio); 1 hold 90% of the variance
    """
    series = refuse_bad(as_series(traj, lengths, part=part))
    entries = series.entries.double()
    if len(entries) < 2:
        raise BadInput("one state alone has no dimension: two or more steps or rows are needed.")
    centered = entries - entries.mean(0)
    found = torch.linalg.svdvals(centered) ** 2 / (len(entries) - 1)  # (min(entry, unit),) falling
    # Beneath this, what is left is the rounding of the mean, and identical states would seem to vary.
    noise = (entries.abs().amax() * torch.finfo(series.values.dtype).eps) ** 2
    found = found.where(found > noise, 0)
    spectrum = found.new_zeros(entries.shape[1])
    spectrum[: len(found)] = found[: len(spectrum)]
    square = float((spectrum**2).sum())
    return Dimension(float(spectrum.sum()) ** 2 / square if square else 0.0, spectrum.to(series.values.dtype))
