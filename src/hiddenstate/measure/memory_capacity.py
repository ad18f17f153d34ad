"""Memory capacity: how many past inputs a linear readout can recover from the state."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ..errors import BadInput
from ..state import shown_in_short
from .linear import as_filter
from .series import Series, refuse_bad, valid_steps, without_padding
from .system import System, at_rest, check_sequence
from .torch_system import driven


@shown_in_short
@dataclass(frozen=True, slots=True, eq=False)
class MemoryCapacity:
    """The share of the input's variance that a linear readout recovers from the state, at each lag."""

    curve: Tensor  # (lags,) R² from lag 0; summed over features where there are several
    total: float
    exact: bool  # computed for a linear layer under white input, not estimated
    threshold: float  # a smaller estimate is within chance, and counts as 0
    coordinates: int  # of the state: under white input, no total can exceed this

    def __str__(self) -> str:
        """Return one line."""
        how = (
            "exact, for a linear layer under white input"
            if self.exact
            else f"estimated; lags below {self.threshold:.2g} count as none"
        )
        if self.total > 1.02 * self.coordinates:
            how += "; more than the state holds, since these inputs tell of each other: give white noise"
        return f"memory capacity {self.total:.2f} of {self.coordinates} over {len(self.curve)} lags ({how})"


def memory_capacity(
    layer: nn.Module,
    x: Tensor,
    lags: int | None = None,
    *,
    lengths: Tensor | None = None,
    washout: int | None = None,
    time_axis: int | None = None,
    batch_axis: int | None = None,
) -> MemoryCapacity:
    """Return how well the input of k steps ago can be read from the state, for k from 0 on, and the sum over k.

    The input should be white noise and long: some thousand steps for each hundred units. A linear layer's states hold
    old inputs in directions whose variance is far below the rounding of any number format. They are therefore computed
    in other coordinates, in which all directions have equal variance, so that no part of the capacity is lost.

    Args:
        layer: A recurrent layer of one direction.
        x: Its input in the layer's own layout: (time, batch, feature) with `batch_first=False`; for a cell
            (batch, time, feature).
        lags: The number of lags, including lag 0; by default four for each coordinate, at most a quarter of
            the steps.
        lengths: The real steps of each row.
        washout: Steps at the beginning that are not used; by default 100, but at most a tenth of the steps.
        time_axis: Which axis of x is time, if not as the layer's own `batch_first` says.
        batch_axis: Which axis of x holds the rows.

    >>> class Delay(torch.nn.Module):
    ...     input_size, hidden_size = 1, 5
    ...     def forward(self, x, state):
    ...         return torch.cat([x, state[:, :-1]], dim=1)
    >>> print(memory_capacity(Delay(), torch.randn(1, 1000, 1), lags=10))
    memory capacity 5.00 of 5 over 10 lags (exact, for a linear layer under white input)
    """
    system, x = driven(layer, x, time_axis=time_axis, batch_axis=batch_axis)
    system = system.in_double()
    x = check_sequence(system, x)
    if not x.is_floating_point() or x.dim() != 3:
        raise BadInput(
            f"memory capacity needs real inputs (batch, time, feature), but x is {tuple(x.shape)} {x.dtype}."
        )
    valid = valid_steps(x, lengths)
    x = without_padding(x, valid)
    longest = int(valid.sum(1).max())
    lags = max(1, min(4 * system.size, longest // 4)) if lags is None else lags
    skip = max(lags - 1, min(100, longest // 10) if washout is None else washout)
    samples = int((valid.sum(1) - skip).clamp(min=0).sum())
    if lags < 1 or samples < 2 * system.size + 10:
        raise BadInput(
            f"{lags} lags of a state of {system.size} coordinates need {2 * system.size + 10} steps or more after the "
            f"first {skip}, but the sequences leave {samples}: give longer ones, or ask for fewer lags."
        )
    with at_rest(system.layer.module):
        linear = as_filter(system, x)
        if linear is not None and _white(x[..., 0], valid, lags):
            curve = linear.capacity(lags)
            return MemoryCapacity(curve, float(curve.sum()), True, 0.0, system.size)
        states = linear.walk(x[..., 0].double()) if linear is not None else _walk(system, x, valid)
    return _estimate(states, x.double(), valid, lags=lags, skip=skip, size=system.size)


def _walk(system: System, x: Tensor, valid: Tensor) -> Tensor:
    states = system.walk(x, system.initial(len(x)))[..., system.smooth].double()
    return refuse_bad(Series(states.masked_fill(~valid.unsqueeze(-1), 0), valid, "the state")).values


def _white(x: Tensor, valid: Tensor, lags: int) -> bool:
    """Say whether neighboring inputs are uncorrelated, as far as their number can tell."""
    x = x.double()
    x = (x - x[valid].mean()) * valid
    power = (x**2).sum()
    if not float(power):
        return False
    for lag in range(1, min(lags, x.shape[1] - 1) + 1):
        pairs = (valid[:, lag:] & valid[:, :-lag]).sum().clamp(min=1)
        share = (x[:, lag:] * x[:, :-lag]).sum() / power
        if float(share.abs()) > 5 / float(pairs) ** 0.5:
            return False
    return True


def _estimate(states: Tensor, x: Tensor, valid: Tensor, *, lags: int, skip: int, size: int) -> MemoryCapacity:
    """Regress the inputs of each lag on the states of all steps after `skip`, corrected for the number of units."""
    used = valid[:, skip:]
    features = states[:, skip:][used]  # (sample, unit), complex for a filter
    features = features - features.mean(0)
    count = len(features)
    left, sizes, _ = torch.linalg.svd(features, full_matrices=False)
    left = left[:, sizes > sizes.sum() * 1e-13 * count**0.5]
    rank = left.shape[1]
    threshold = 4 * (2 * rank) ** 0.5 / count  # four standard deviations of the R² of unrelated numbers
    curve = torch.zeros(lags, dtype=torch.float64, device=x.device)
    for lag in range(lags):
        wanted = x[:, skip - lag : x.shape[1] - lag][used]  # (sample, feature)
        wanted = wanted - wanted.mean(0)
        power = (wanted**2).sum(0)
        found = (left.mH @ wanted.to(left.dtype)).abs().square().sum(0) / power.clamp(min=1e-300)
        honest = 1 - (1 - found) * (count - 1) / (count - 1 - rank)
        curve[lag] = honest.where((honest > threshold) & (power > 0), 0).clamp(max=1).sum()
    return MemoryCapacity(curve, float(curve.sum()), False, threshold, size)
