"""Mean, spread and range of each unit, and what is not a number at all."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..recording import Trajectory
from .series import as_series, first_bad


@dataclass(frozen=True, slots=True, eq=False)
class Statistics:
    """Each unit over all real steps of all rows; NaN and Inf are counted, and left out of the rest."""

    mean: Tensor  # (unit,)
    std: Tensor  # (unit,) of a sample, as torch.std; 0 where there is one value only
    min: Tensor  # (unit,)
    max: Tensor  # (unit,)
    nan: int
    inf: int
    first: tuple[int, int, int] | None  # (row, step, unit) of the earliest NaN or Inf
    count: int  # real steps of all rows together

    def __str__(self) -> str:
        """Return one line, and one more where something is not finite."""
        line = (
            f"{len(self.mean)} units over {self.count} steps: mean {_mean(self.mean):.3g}, std {_mean(self.std):.3g}, "
            f"from {_end(self.min, torch.amin):.3g} to {_end(self.max, torch.amax):.3g}"
        )
        if self.first is None:
            return f"{line}; all finite"
        row, step, unit = self.first
        return f"{line}\n{self.nan} NaN and {self.inf} Inf, the first at step {step} of row {row} (unit {unit})"


def statistics(traj: Trajectory | Tensor, *, lengths: Tensor | None = None, part: str = "h") -> Statistics:
    """Return mean, std, min and max of each unit, and where the first NaN or Inf is.

    >>> states = torch.tensor([[[1.0, 4.0], [3.0, float("nan")]]])
    >>> print(statistics(states))
    2 units over 2 steps: mean 3, std 0.707, from 1 to 4
    1 NaN and 0 Inf, the first at step 1 of row 0 (unit 1)
    """
    series = as_series(traj, lengths, part=part)
    entries = series.entries.double()  # (entry, unit): many steps are summed
    finite = entries.isfinite()
    count = finite.sum(0)
    known = entries.where(finite, 0)
    mean = known.sum(0) / count  # NaN for a unit that has no finite value
    spread = ((known - mean).where(finite, 0) ** 2).sum(0)
    dtype = series.values.dtype
    missing = count == 0
    return Statistics(
        mean=mean.to(dtype),
        std=(spread / (count - 1).clamp(min=1)).sqrt().masked_fill(missing, torch.nan).to(dtype),
        min=entries.where(finite, torch.inf).amin(0).masked_fill(missing, torch.nan).to(dtype),
        max=entries.where(finite, -torch.inf).amax(0).masked_fill(missing, torch.nan).to(dtype),
        nan=int(entries.isnan().sum()),
        inf=int(entries.isinf().sum()),
        first=first_bad(series.values, series.valid),
        count=len(entries),
    )


def _mean(values: Tensor) -> float:
    return float(values.nanmean())


def _end(values: Tensor, end: object) -> float:
    known = values[~values.isnan()]
    return float(end(known)) if callable(end) and len(known) else float("nan")
