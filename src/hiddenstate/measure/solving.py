"""Following many starts at once to the zeros of F(s) - s."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from .system import System

_CHUNK = 2**23  # numbers in the Jacobians that are held at once
_PATIENCE = 12  # steps in a row with hardly any gain, after which a start is stuck in a dip that is no zero


class Search:
    """Levenberg–Marquardt on ‖F(s) - s‖² for every start on its own, all in one batch.

    A Newton step is damped until it leads downhill; near a zero the damping vanishes and each step doubles the digits.
    """

    def __init__(self, system: System, x: Tensor, starts: Tensor, tolerance: float) -> None:
        """Stand at the starts."""
        self.system, self.x, self.tolerance = system, x, tolerance
        self.states = starts.clone()
        self.misses = self._miss(starts)  # (start, S)
        self.damping = torch.full((len(starts),), 1e-2, dtype=torch.float64, device=starts.device)
        self.stalled = torch.zeros(len(starts), dtype=torch.int64, device=starts.device)
        self.polished = torch.zeros(len(starts), dtype=torch.bool, device=starts.device)

    def run(self, iterations: int) -> Iterator[None]:
        """Take a step with every start that is still on its way; yield after each."""
        for _ in range(iterations):
            active = (~self.polished & (self.stalled < _PATIENCE)).nonzero().flatten()
            if not len(active):
                return
            stride = max(1, _CHUNK // self.system.size**2)
            for begin in range(0, len(active), stride):
                self._advance(active[begin : begin + stride])
            yield

    def arrived(self) -> tuple[Tensor, Tensor]:
        """Return the states that are fixed, and their residuals."""
        residuals = self.misses.norm(dim=1)
        fixed = residuals <= self.tolerance
        return self.states[fixed], residuals[fixed]

    def _advance(self, rows: Tensor) -> None:
        smooth = self.system.smooth
        miss = self.misses[rows].double()
        slope = self._slope(rows).double()
        square = slope.mT @ slope
        square.diagonal(dim1=1, dim2=2).add_(self.damping[rows].unsqueeze(1))
        step = torch.linalg.solve_ex(square, -(slope.mT @ miss.unsqueeze(2)))[0].squeeze(2)
        tried = self.states[rows].clone()
        tried[:, smooth] += step.to(tried.dtype)
        missed = self._miss(tried)
        before, after = miss.norm(dim=1), missed.double().norm(dim=1)
        better = after < before  # False for NaN
        self.states[rows[better]] = tried[better]
        self.misses[rows[better]] = missed[better]
        self.damping[rows] = torch.where(better, self.damping[rows] / 10, self.damping[rows] * 10).clamp(min=1e-14)
        self.stalled[rows] = torch.where(after < 0.98 * before, 0, self.stalled[rows] + 1)
        # Go on below the tolerance until rounding stops the descent: the last steps are the exact ones.
        self.polished[rows] = (torch.minimum(before, after.nan_to_num(torch.inf)) <= self.tolerance) & (
            ~better | (after > before / 2) | (after == 0)
        )

    def _miss(self, states: Tensor) -> Tensor:
        with torch.no_grad():
            following = self.system.step(self.x.expand(len(states), *self.x.shape[1:]), states)
        return (following - states)[:, self.system.smooth]

    def _slope(self, rows: Tensor) -> Tensor:
        slope = self.system.jacobians(self.x.expand(len(rows), *self.x.shape[1:]), self.states[rows])
        slope.diagonal(dim1=1, dim2=2).sub_(1)
        return slope
