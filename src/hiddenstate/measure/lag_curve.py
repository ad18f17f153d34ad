"""Curves over distances back in time: their confidence band, reach and half-life."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def band(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Return the ends of a 95% confidence band of the mean over `rows (batch, lag)`, (lag,) each; NaN is left out.

    It is a band of the mean's logarithm (delta method), so that it stays positive, as influence is.
    """
    curve = rows.nanmean(0)
    count = (~rows.isnan()).sum(0)
    spread = ((rows - curve) ** 2).nansum(0) / (count - 1).clamp(min=1)
    margin = torch.where(curve > 0, 1.96 * (spread / count).sqrt() / curve, 0.0)
    return curve * torch.exp(-margin), curve * torch.exp(margin)


def reach(curve: Tensor, threshold: float) -> int:
    """Return the number of lags, from 0 on, up to the last one with at least `threshold` of the peak."""
    felt = (curve >= threshold * curve.max()) & (curve > 0)
    return int(felt.nonzero()[-1]) + 1 if bool(felt.any()) else 0


def half_life(curve: Tensor) -> float:
    """Return the lag at which the curve has fallen to half its peak, exact for an exponential; inf if it never falls.

    Between two lags and beyond the last one, the logarithm is taken to be linear. NaN if the curve is zero throughout.

    >>> half_life(torch.tensor([8.0, 4.0, 2.0]))
    1.0
    """
    values = curve.double()
    peak = int(values.argmax())
    half = float(values[peak]) / 2
    if not half > 0:
        return math.nan
    below = (values[peak:] <= half * (1 + 1e-9)).nonzero()  # allow for rounding if the curve meets the half exactly
    if not len(below):
        lost = math.log(float(values[peak]) / float(values[-1]))
        return peak + math.log(2) * (len(values) - 1 - peak) / lost if lost > 0 else math.inf
    lag = peak + int(below[0])
    high, low = float(values[lag - 1]), float(values[lag])
    if low <= 0:
        return lag - 1 + (high - half) / high
    return lag - 1 + math.log(high / half) / math.log(high / low)


def by_lag(norms: Tensor, ends: Tensor) -> Tensor:
    """Turn `norms (batch, time)` by step into (batch, lag) by distance from each row's end; NaN before its start."""
    lags = torch.arange(int(ends.max()) + 1, device=norms.device)
    steps = ends.unsqueeze(1) - lags  # (batch, lag)
    return norms.gather(1, steps.clamp(min=0)).masked_fill(steps < 0, torch.nan)
