"""Projection of states to the plane in which they differ most, so that their paths can be drawn."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..errors import BadInput
from .picture_data import picked

_WORK = 4e9  # multiplications to spend on the axes: about a second


@dataclass(frozen=True, slots=True, eq=False)
class Projection:
    """Principal axes of a cloud of states."""

    center: Tensor  # (unit,)
    axes: Tensor  # (component, unit), orthonormal
    explained: Tensor  # (component,) the share of the variance along each axis
    note: str = ""  # says so if the axes were computed from a part of the states

    def __call__(self, states: Tensor) -> Tensor:
        """Return `states (..., unit)` projected: (..., component)."""
        return (states.to(self.center) - self.center) @ self.axes.T

    def label(self, component: int) -> str:
        """Return the label of one axis."""
        return f"PC {component + 1} ({float(self.explained[component]):.0%} of variance)"


def project(states: Tensor, components: int = 2) -> Projection:
    """Return the first principal axes of `states (n, unit)`, each with its largest weight positive.

    >>> line = torch.arange(5.0)[:, None] * torch.tensor([3.0, 4.0])
    >>> project(line).explained.round(decimals=3)
    tensor([1., 0.])
    """
    finite = states.detach().sum(1, dtype=torch.float64).isfinite()  # false for a row with a NaN or Inf
    cloud = states.detach() if bool(finite.all()) else states.detach()[finite]
    if not len(cloud):
        raise BadInput("there is no state without NaN or Inf: nothing is left to project.")
    # If there are very many states, an evenly spaced selection gives nearly the same axes.
    kept = picked(cloud, max(1024, int(_WORK // cloud.shape[1] ** 2)), what="states")
    cloud = kept.values.to("cpu", torch.float64)
    center = cloud.mean(0)
    strength, axes = principal(cloud - center)
    axes, total = axes[:components], strength.sum().clamp(min=1e-300)
    lacking = components - len(axes)
    if lacking > 0:  # fewer units or states than axes: the other axes are zero
        axes = torch.cat([axes, axes.new_zeros(lacking, len(center))])
        strength = torch.cat([strength, strength.new_zeros(lacking)])
    note = f"axes from {kept.note}" if kept.note else ""
    return Projection(center.float(), axes.float(), (strength[:components] / total).float(), note)


def principal(moves: Tensor) -> tuple[Tensor, Tensor]:
    """Return variances in falling order and their axes as rows, using the smaller of the two square matrices."""
    states, units = moves.shape
    if units <= states:
        strength, axes = torch.linalg.eigh(moves.T @ moves)
        strength, axes = strength.flip(0).clamp(min=0), axes.T.flip(0)
    else:
        strength, sides = torch.linalg.eigh(moves @ moves.T)
        strength, axes = strength.flip(0).clamp(min=0), sides.flip(1).T @ moves
        axes = axes / axes.norm(dim=1, keepdim=True).clamp(min=1e-12)
    # The sign of an axis is arbitrary; without a rule, two runs could draw mirror images.
    largest = axes.gather(1, axes.abs().argmax(1, keepdim=True))
    return strength, torch.where(largest < 0, -axes, axes)
