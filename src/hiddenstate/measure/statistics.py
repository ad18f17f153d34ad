"""Statistics of each unit: mean, spread, range and histogram, and the number of NaN and Inf."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from ..state import shown_in_short
from .series import ManyStates, Series, first_bad, pieces

_BINS = 256  # of the histogram, for both signs together
_SMALLEST = 2.0**-30  # the range of a histogram of zeros


@shown_in_short
@dataclass(frozen=True, slots=True, eq=False)
class Statistics:
    """Statistics of each unit over all real steps of all rows; NaN and Inf are counted, and otherwise left out."""

    mean: Tensor  # (unit,)
    std: Tensor  # (unit,) of a sample, as torch.std; 0 if there is only one value
    min: Tensor  # (unit,)
    max: Tensor  # (unit,)
    nan: int
    inf: int
    first: tuple[int, int, int] | None  # (row, step, unit) of the earliest NaN or Inf; rows are counted across runs
    count: int  # real steps of all rows together
    near_zero: float  # share of finite values whose size is below `small`
    small: float
    histogram: Tensor  # (256,) int64, finite values of all units in each bin
    edges: Tensor  # (257,) evenly from -2ⁿ to 2ⁿ, the smallest such range that holds all values

    def __str__(self) -> str:
        """Return one line, and one more where something is not finite."""
        line = (
            f"{len(self.mean)} units over {self.count} steps: mean {_mean(self.mean):.3g}, std {_mean(self.std):.3g}, "
            f"from {_end(self.min, torch.amin):.3g} to {_end(self.max, torch.amax):.3g}, "
            f"{self.near_zero:.1%} near zero (below {self.small:g})"
        )
        if self.first is None:
            return f"{line}; all finite"
        row, step, unit = self.first
        return f"{line}\n{self.nan} NaN and {self.inf} Inf, the first at step {step} of row {row} (unit {unit})"


def statistics(traj: ManyStates, small: float = 0.01, *, lengths: Tensor | None = None, part: str = "h") -> Statistics:
    """Return mean, std, min and max of each unit, a histogram, and where the first NaN or Inf is.

    Many runs of unequal length, `recording.runs("l0")` or an iterator of them, are measured together, one at a time.

    Args:
        traj: A trajectory, states (batch, time, unit), or several of them.
        small: The size below which a value is near zero.
        lengths: The real steps of each row of a plain tensor.
        part: `h`, `c`, another part of the state, a gate, or the gradient of a part, `grads.h`.

    >>> states = torch.tensor([[[1.0, 4.0], [3.0, float("nan")]]])
    >>> print(statistics(states))
    2 units over 2 steps: mean 3, std 0.707, from 1 to 4, 0.0% near zero (below 0.01)
    1 NaN and 0 Inf, the first at step 1 of row 0 (unit 1)
    """
    total = RunningStatistics(small)
    for series in pieces(traj, lengths, part=part):
        total.add(series)
    return total.result()


class RunningStatistics:
    """Sums for statistics, accumulated run by run."""

    def __init__(self, small: float = 0.01) -> None:
        """Start without any runs."""
        self.small = small
        self.nan = self.inf = self.near = self.entries = self.rows = 0
        self.first: tuple[int, int, int] | None = None
        self.bins, self.reach = torch.zeros(_BINS, dtype=torch.int64), _SMALLEST
        self.count: Tensor | None = None  # (unit,) finite values, as of the others

    def add(self, series: Series) -> None:
        """Add one run."""
        entries = series.entries.double()  # (entry, unit): double, since many steps are summed
        finite = entries.isfinite()
        self._add_moments(entries, finite)
        where = first_bad(series.values, series.valid)
        if where is not None and (self.first is None or where[1] < self.first[1]):
            self.first = (self.rows + where[0], *where[1:])
        self.rows += len(series.values)
        self.entries += len(entries)
        self.nan += int(entries.isnan().sum())
        self.inf += int(entries.isinf().sum())
        known = entries[finite]
        self.near += int((known.abs() < self.small).sum())
        self._add_to_bins(known)
        self.dtype = series.values.dtype

    def _add_moments(self, entries: Tensor, finite: Tensor) -> None:
        count = finite.sum(0)
        known = entries.where(finite, 0)
        mean = known.sum(0) / count.clamp(min=1)
        spread = ((known - mean).where(finite, 0) ** 2).sum(0)
        low, high = entries.where(finite, torch.inf).amin(0), entries.where(finite, -torch.inf).amax(0)
        if self.count is None:
            self.count, self.mean, self.spread, self.low, self.high = count, mean, spread, low, high
            return
        together = (self.count + count).clamp(min=1)
        apart = mean - self.mean  # Chan's rule: combines sums of squares about two means
        self.spread = self.spread + spread + apart**2 * self.count * count / together
        self.mean = self.mean + apart * count / together
        self.low, self.high = torch.minimum(self.low, low), torch.maximum(self.high, high)
        self.count = self.count + count

    def _add_to_bins(self, known: Tensor) -> None:
        largest = float(known.abs().max()) if len(known) else 0.0
        while self.reach < largest:  # doubling the range merges bins in pairs, without another look at the values
            half = self.bins.reshape(-1, 2).sum(1)
            self.bins = torch.cat([half.new_zeros(_BINS // 4), half, half.new_zeros(_BINS // 4)])
            self.reach *= 2
        places = ((known / self.reach + 1) * (_BINS / 2)).floor().long().clamp(0, _BINS - 1)
        self.bins += torch.bincount(places.cpu(), minlength=_BINS)

    def result(self) -> Statistics:
        """Return the statistics of all runs together."""
        assert self.count is not None
        missing = self.count == 0
        mean, low, high = (v.masked_fill(missing, torch.nan).to(self.dtype) for v in (self.mean, self.low, self.high))
        std = (self.spread / (self.count - 1).clamp(min=1)).sqrt().masked_fill(missing, torch.nan).to(self.dtype)
        known = int(self.count.sum())
        return Statistics(
            mean=mean,
            std=std,
            min=low,
            max=high,
            nan=self.nan,
            inf=self.inf,
            first=self.first,
            count=self.entries,
            near_zero=self.near / known if known else math.nan,
            small=self.small,
            histogram=self.bins,
            edges=torch.linspace(-self.reach, self.reach, _BINS + 1, dtype=torch.float64),
        )


def _mean(values: Tensor) -> float:
    return float(values.nanmean())


def _end(values: Tensor, end: object) -> float:
    known = values[~values.isnan()]
    return float(end(known)) if callable(end) and len(known) else float("nan")
