"""Clustering of states by k-means, with the same result on every machine."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..errors import BadInput
from ..state import shown_in_short

_ROUNDS = 100
_STARTS = 5  # k-means depends on its start: the best of several is taken


@shown_in_short
@dataclass(frozen=True, slots=True, eq=False)
class Clusters:
    """Cluster centers, and the cluster of each state."""

    centers: Tensor  # (cluster, unit), beginning with the largest cluster
    numbers: Tensor  # (state,) int64
    spread: float  # the sum of squared distances from the centers

    def nearest(self, states: Tensor) -> Tensor:
        """Return the number of the nearest center for each of `states (n, unit)`: (n,)."""
        return _nearest(states.to(self.centers), self.centers)[0]


def k_means(states: Tensor, clusters: int, *, seed: int = 0) -> Clusters:
    """Return `states (n, unit)` in that many clusters; in fewer if there are fewer different states.

    >>> k_means(torch.tensor([[0.0], [0.1], [0.2], [9.0]]), 2).numbers
    tensor([0, 0, 0, 1])
    """
    if isinstance(clusters, bool) or not isinstance(clusters, int) or not 1 <= clusters <= len(states):
        raise BadInput(f"{len(states)} states fall into 1 to {len(states)} clusters, but {clusters!r} are asked for.")
    values = states.detach().double()
    generator = torch.Generator().manual_seed(seed)
    found = [_settled(values, _beginning(values, clusters, generator)) for _ in range(_STARTS)]
    best = min(found, key=lambda one: one.spread)
    sizes = best.numbers.bincount(minlength=len(best.centers))
    order = sizes.argsort(descending=True, stable=True)
    order = order[sizes[order] > 0]
    rank = torch.empty_like(sizes).scatter_(0, order, torch.arange(len(order), device=order.device))
    return Clusters(best.centers[order], rank[best.numbers], best.spread)


def _beginning(values: Tensor, clusters: int, generator: torch.Generator) -> Tensor:
    """Return starting centers, each far from those before it (k-means++)."""
    chosen = [int(torch.randint(len(values), (1,), generator=generator))]
    for _ in range(1, clusters):
        apart = _nearest(values, values[chosen])[1]
        if not bool(apart.any()):
            break
        chosen.append(int(torch.multinomial(apart.cpu() / apart.cpu().sum(), 1, generator=generator)))
    return values[chosen]


def _settled(values: Tensor, centers: Tensor) -> Clusters:
    numbers, apart = _nearest(values, centers)
    for _ in range(_ROUNDS):
        member = torch.nn.functional.one_hot(numbers, len(centers)).to(values)  # (state, cluster)
        sizes = member.sum(0).unsqueeze(1)
        centers = torch.where(sizes > 0, member.T @ values / sizes.clamp(min=1), centers)
        moved, apart = _nearest(values, centers)
        if torch.equal(moved, numbers):
            break
        numbers = moved
    return Clusters(centers, numbers, float(apart.sum()))


def _nearest(values: Tensor, centers: Tensor) -> tuple[Tensor, Tensor]:
    """Return the nearest center of each state, (state,), and the squared distance to it, (state,)."""
    apart = torch.cdist(values, centers, compute_mode="donot_use_mm_for_euclid_dist").square()
    least = apart.min(1)
    return least.indices, least.values
