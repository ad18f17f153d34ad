"""Novelty: how unlike all states seen before each state is."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from ..errors import BadInput
from ..recording import refuse_time_first
from ..state import shown_in_short
from .series import ManyStates, Series, as_series, pieces, refuse_bad

_FOLDS = 5  # of the seen states, each scored by the others
_KEPT = 8192  # seen states to search for neighbors; more of them, evenly spaced, add no information
_CHUNK = 2**22  # distances held at once
_RIDGE = 1e-4  # added to the variances, times their mean: directions with hardly any variance must not dominate


@shown_in_short
@dataclass(frozen=True, slots=True, eq=False)
class Novelty:
    """How strange each step is, and how strange seen states are to each other."""

    scores: Tensor  # (batch, time) float64; NaN in the padding and the warmup
    threshold: float  # the quantile of the seen states' own scores
    quantile: float
    seen: Tensor  # (n,) rising: the score of each seen state against the others
    method: str
    taken: str = ""  # where rows and steps were taken to lie, where a plain tensor does not tell

    @property
    def flagged(self) -> Tensor:
        """Which steps are stranger than the threshold: bool (batch, time)."""
        return self.scores > self.threshold

    @property
    def rarity(self) -> Tensor:
        """The share of seen states that are at least as strange: (batch, time); NaN where there is no score."""
        above = len(self.seen) - torch.searchsorted(self.seen, self.scores.nan_to_num())
        return (above / len(self.seen)).double().masked_fill(self.scores.isnan(), torch.nan)

    def auc(self, truth: Tensor) -> float:
        """Return ROC AUC: the chance that a strange step scores above a normal one; NaN if there is only one kind.

        `truth` is (batch, time) bool, or (batch,), for which each row counts with its highest score.
        """
        truth = torch.as_tensor(truth).to(self.scores.device)
        if truth.shape not in (self.scores.shape, self.scores.shape[:1]):
            raise BadInput(
                f"truth has shape {tuple(truth.shape)}, but {tuple(self.scores.shape)} is needed, one for each row and "
                f"step, or {tuple(self.scores.shape[:1])}, one for each row."
            )
        scores = self.scores.nan_to_num(-torch.inf).amax(1) if truth.dim() == 1 else self.scores
        known = scores.isfinite()
        strange, scores = truth.bool()[known], scores[known]
        bad, good = int(strange.sum()), int((~strange).sum())
        if not bad or not good:
            return math.nan
        _, where, counts = torch.unique(scores, return_inverse=True, return_counts=True)
        last = counts.cumsum(0)
        rank = (last - (counts - 1) / 2)[where]  # ties share the mean of their ranks
        return (float(rank[strange].double().sum()) - bad * (bad + 1) / 2) / (bad * good)

    def __str__(self) -> str:
        """Return one line."""
        known = ~self.scores.isnan()
        row, step = divmod(int(self.scores.nan_to_num(-torch.inf).argmax()), self.scores.shape[1])
        share = float(self.flagged.sum()) / float(known.sum())
        how = "Mahalanobis distance" if self.method == "mahalanobis" else "distance to seen states"
        return (
            f"{share:.1%} of {int(known.sum())} steps are stranger than {self.quantile:.3g} of {len(self.seen)} seen "
            f"states ({how} above {self.threshold:.3g}); the strangest is step {step} of row {row}, "
            f"{float(self.scores[row, step]):.3g}{'; ' if self.taken else ''}{self.taken}"
        )


def novelty(
    traj: ManyStates,
    seen: ManyStates,
    *,
    method: Literal["mahalanobis", "nearest"] = "mahalanobis",
    quantile: float = 0.99,
    warmup: int | tuple[int, int] = 0,
    lengths: Tensor | None = None,
    part: str = "h",
) -> Novelty:
    """Return how unlike the states `seen` in training each state of `traj` is.

    An anomaly that ends before its sequence may leave no trace in the final state, but it does in the states on the
    way. The threshold comes from the seen states themselves: each is scored by states outside its own neighborhood in
    time.

    Args:
        traj: The states to score; the rows of many runs are taken together.
        seen: States of normal sequences: a trajectory, a tensor, or many runs.
        method: `mahalanobis`, the distance from the cloud of seen states in units of its deviations; or `nearest`, the
            distance from the five nearest seen states, for clouds with holes or several parts.
        quantile: A step is flagged if it scores above this quantile of the seen states' own scores.
        warmup: The number of first steps of each row to leave out, since the initial state still dominates them. A pair
            gives it for seen and for scored rows: `(64, 0)` if the scored ones continue from a carried state.
        lengths: The real steps of each row of a plain `traj`.
        part: Which part of trajectories: `h`, `c`, or a gate.

    >>> normal = torch.randn(20, 50, 4, generator=torch.Generator().manual_seed(0))
    >>> new = torch.zeros(1, 10, 4)
    >>> new[0, 6] = 9.0
    >>> hs.measure.novelty(new, normal).flagged.nonzero()
    tensor([[0, 6]])
    """
    if method not in ("mahalanobis", "nearest"):
        raise BadInput(f"method is mahalanobis or nearest, but is {method!r}.")
    if not 0 < quantile < 1:
        raise BadInput(f"the quantile lies between 0 and 1, but is {quantile!r}.")
    before_seen, before = warmup if isinstance(warmup, tuple) else (warmup, warmup)
    if min(before_seen, before) < 0:
        raise BadInput(f"warmup is {warmup!r}: steps to leave out, or a pair of them, for seen and for judged rows.")
    for one in (traj, seen):
        if isinstance(one, Tensor):
            refuse_time_first(one)
    series = refuse_bad(as_series(traj, lengths, part=part, final=True))
    known = torch.cat(
        [one.values[_after(one, before_seen)] for one in map(refuse_bad, pieces(seen, part=part))]
    ).double()
    if len(known) < 2 * _FOLDS:
        raise BadInput(f"only {len(known)} seen states are left, but {2 * _FOLDS} or more are needed to compare with.")
    if known.shape[1] != series.values.shape[2]:
        raise BadInput(f"the states have {series.values.shape[2]} units, but the seen ones {known.shape[1]}.")
    score = _mahalanobis if method == "mahalanobis" else _nearest
    folds = known.tensor_split(_FOLDS)  # contiguous: states close in time resemble each other
    own = torch.cat([score(fold, torch.cat([*folds[:n], *folds[n + 1 :]])) for n, fold in enumerate(folds)])
    own = own.sort().values
    scores = torch.full(series.valid.shape, torch.nan, dtype=torch.float64, device=series.values.device)
    judged = _after(series, before)
    if not bool(judged.any()):
        raise BadInput(f"the longest judged row has {int(series.lengths.max())} steps, and {before} are left out.")
    scores[judged] = score(series.values[judged].double(), known.to(series.values.device))
    place = min(len(own) - 1, math.ceil(quantile * len(own)) - 1)
    return Novelty(scores, float(own[place]), quantile, own.to(scores.device), method, series.assumed)


def _after(series: Series, warmup: int) -> Tensor:
    """Return which real steps come after the first `warmup` ones: bool (batch, time)."""
    return series.valid & (torch.arange(series.valid.shape[1], device=series.valid.device) >= warmup)


def _mahalanobis(states: Tensor, known: Tensor) -> Tensor:
    """Return each state's distance from the cloud, in units of the cloud's deviations: (n,)."""
    center = known.mean(0)
    moved = known - center
    cloud = moved.T @ moved / (len(known) - 1)
    ridge = _RIDGE * float(cloud.diagonal().mean()) or torch.finfo(cloud.dtype).tiny ** 0.5
    cloud.diagonal().add_(ridge)
    apart: Tensor = torch.linalg.solve_triangular(torch.linalg.cholesky(cloud), (states - center).T, upper=False)
    return apart.square().sum(0).sqrt()


def _nearest(states: Tensor, known: Tensor) -> Tensor:
    """Return each state's mean distance from its five nearest, in units of the deviation of all units: (n,)."""
    known = known[torch.arange(0, len(known), -(-len(known) // _KEPT), device=known.device)]
    scale = float((known - known.mean(0)).square().mean().sqrt()) or 1.0
    near = min(5, len(known))
    found = [
        torch.cdist(piece, known, compute_mode="donot_use_mm_for_euclid_dist").topk(near, largest=False).values.mean(1)
        for piece in torch.split(states, max(1, _CHUNK // len(known)))
    ]
    return torch.cat(found) / scale if found else states.new_zeros(0)
