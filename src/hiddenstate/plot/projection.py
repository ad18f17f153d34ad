"""The plane in which states differ most, so that paths through many dimensions can be drawn."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..errors import BadInput
from .thinning import picked

_WIDE = 2048  # units up to which every state counts; of wider ones, that many states evenly spread give the axes


@dataclass(frozen=True, slots=True, eq=False)
class Projection:
    """Principal axes of a cloud of states."""

    center: Tensor  # (unit,)
    axes: Tensor  # (component, unit), orthonormal
    explained: Tensor  # (component,) share of the variance that each axis holds

    def __call__(self, states: Tensor) -> Tensor:
        """Return `states (..., unit)` in the plane: (..., component)."""
        return (states.to(self.center) - self.center) @ self.axes.T

    def label(self, component: int) -> str:
        """Return what to write along one axis."""
        return f"PC {component + 1} ({float(self.explained[component]):.0%} of variance)"


def project(states: Tensor, components: int = 2) -> Projection:
    """Return the first principal axes of `states (n, unit)`, each with its largest weight positive.

    >>> line = torch.arange(5.0)[:, None] * torch.tensor([3.0, 4.0])
    >>> project(line).explained.round(decimals=3)
    tensor([1., 0.])
    """
    cloud = states.detach().to("cpu", torch.float64)
    cloud = cloud[cloud.isfinite().all(1)]
    if not len(cloud):
        raise BadInput("there is no state without NaN or Inf: nothing is left to project.")
    if cloud.shape[1] > _WIDE:
        cloud = picked(cloud, _WIDE, what="states").values
    center = cloud.mean(0)
    strength, axes = _principal(cloud - center)
    axes, total = axes[:components], strength.sum().clamp(min=1e-300)
    lacking = components - len(axes)
    if lacking > 0:  # fewer units or states than axes: the rest of the axes hold nothing
        axes = torch.cat([axes, axes.new_zeros(lacking, len(center))])
        strength = torch.cat([strength, strength.new_zeros(lacking)])
    # The sign of an axis means nothing; without a rule, two runs would draw mirror images.
    largest = axes.gather(1, axes.abs().argmax(1, keepdim=True))
    axes = torch.where(largest < 0, -axes, axes)
    return Projection(center.float(), axes.float(), (strength[:components] / total).float())


def _principal(moves: Tensor) -> tuple[Tensor, Tensor]:
    """Return variances, falling, and their axes as rows, through the smaller of the two square matrices."""
    states, units = moves.shape
    if units <= states:
        strength, axes = torch.linalg.eigh(moves.T @ moves)
        return strength.flip(0).clamp(min=0), axes.T.flip(0)
    strength, sides = torch.linalg.eigh(moves @ moves.T)
    strength, sides = strength.flip(0).clamp(min=0), sides.flip(1)
    axes = sides.T @ moves
    return strength, axes / axes.norm(dim=1, keepdim=True).clamp(min=1e-12)
