"""Linear readouts of states, evaluated on held-out rows, for all steps at once."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

_STRENGTHS = tuple(10.0**power for power in range(-8, 3))  # of the penalty, in units of the largest variance


@dataclass(frozen=True, slots=True)
class Readout:
    """Ridge regression whose penalty is chosen by generalized cross-validation within the training rows."""

    weakest: float = 1e-8  # penalty; a stronger one reads nothing from directions in which states hardly vary
    groups: int = 1  # outputs come in that many groups of equal size, each with its own penalty

    def predict(self, features: Tensor, targets: Tensor, train: Tensor) -> Tensor:
        """Fit on the rows marked by `train`, and predict for all rows.

        Args:
            features: (step, row, unit)
            targets: (step, row, output)
            train: (step, row) bool
        """
        mask = train.unsqueeze(-1).to(features.dtype)  # (step, row, 1)
        count = mask.sum(1, keepdim=True).clamp(min=1)  # (step, 1, 1)
        center = (features * mask).sum(1, keepdim=True) / count
        moved = features - center
        spread = ((moved * mask) ** 2).sum(1, keepdim=True).div(count).sqrt()
        # A unit whose spread is only rounding must not be scaled to the size of the others.
        still = spread <= 1e-9 * features.abs().amax(1, keepdim=True).clamp(min=1e-30)
        moved = (moved / spread.masked_fill(still, 1)).masked_fill(still, 0)
        middle = (targets * mask).sum(1, keepdim=True) / count
        wanted = (targets - middle) * mask
        left, sizes, right = torch.linalg.svd(moved * mask, full_matrices=False)
        seen = left.mT @ wanted  # (step, rank, output)
        shrink = self._shrinkage(sizes, seen, wanted, count)  # (step, rank, output)
        weights = right.mT @ (shrink / sizes.clamp(min=1e-150).unsqueeze(-1) * seen)
        predicted: Tensor = moved @ weights + middle
        return predicted

    def _shrinkage(self, sizes: Tensor, seen: Tensor, wanted: Tensor, count: Tensor) -> Tensor:
        squares = (sizes**2).unsqueeze(1)  # (step, 1, rank)
        largest = squares[..., :1].clamp(min=1e-300)
        power = self._by_group(seen**2)  # (step, group, rank)
        rest = self._by_group(wanted**2).sum(2) - power.sum(2)  # (step, group): what no weights can explain
        rows = count[:, 0]  # (step, 1)
        best, shrink = torch.full_like(rest, torch.inf), torch.zeros_like(power)
        for strength in (s for s in _STRENGTHS if s >= self.weakest):
            tried = squares / (squares + strength * largest)
            freedom = tried.sum(2) + 1
            error = rest.clamp(min=0) + ((1 - tried) ** 2 * power).sum(2)
            score = error / (1 - freedom / rows).clamp(min=1e-9) ** 2
            score = score.masked_fill(freedom > 0.95 * rows, torch.inf)  # it would only memorize
            better = score < best
            best, shrink = torch.where(better, score, best), torch.where(better.unsqueeze(2), tried, shrink)
        return shrink.repeat_interleave(wanted.shape[2] // self.groups, dim=1).transpose(1, 2)

    def _by_group(self, squares: Tensor) -> Tensor:
        steps, rows, _ = squares.shape
        return squares.reshape(steps, rows, self.groups, -1).sum(3).transpose(1, 2)


def held_out(features: Tensor, targets: Tensor, folds: Tensor, readout: Readout) -> Tensor:
    """Return predictions (step, row, output); each row's come from a readout that was fitted without its fold.

    `folds (step, row)` are numbers from 0 on; a row with -1 is used neither for fitting nor for prediction.
    """
    predicted = torch.zeros_like(targets)
    for fold in range(int(folds.max()) + 1):
        test = folds == fold
        guess = readout.predict(features, targets, (folds >= 0) & ~test)
        predicted = torch.where(test.unsqueeze(-1), guess, predicted)
    return predicted


def explained(targets: Tensor, predicted: Tensor, valid: Tensor) -> Tensor:
    """Return R² over rows and outputs at each step (step,); NaN where the targets do not vary."""
    mask = valid.unsqueeze(-1).to(targets.dtype)
    middle = (targets * mask).sum(1, keepdim=True) / mask.sum(1, keepdim=True).clamp(min=1)
    total = ((targets - middle) ** 2 * mask).sum((1, 2))
    missed = ((targets - predicted) ** 2 * mask).sum((1, 2))
    return torch.where(total > 0, 1 - missed / total, torch.nan)
