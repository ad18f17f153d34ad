"""How far two tensors, or the outcomes of two calls, are apart."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..state import tensors

if TYPE_CHECKING:
    from .outcome import Outcome


def same(a: Tensor, b: Tensor) -> bool:
    """Say whether two tensors hold the same values, NaN being equal to NaN."""
    return a.shape == b.shape and bool(_equal(a, b).all())


def change(old: Tensor, new: Tensor) -> Tensor:
    """Return the size of the change of each entry, zero where both are the same NaN or Inf."""
    gap = (new.detach().double() - old.detach().double()).abs()
    return torch.where(_equal(old, new), torch.zeros_like(gap), gap).nan_to_num(nan=float("inf")).cpu()


def eps(tensor: Tensor) -> float:
    """Return the precision of a tensor's numbers."""
    return float(torch.finfo(tensor.dtype).eps)


def gap(a: Outcome, b: Outcome) -> float:
    """Return the largest difference between two calls' results, relative to their size; inf for other shapes."""
    worst = 0.0
    ours, theirs = ({path: t for path, t in tensors(o.result).items() if t.numel()} for o in (a, b))
    if ours.keys() != theirs.keys():
        return float("inf")
    for path, old in ours.items():
        new = theirs[path]
        if old.shape != new.shape:
            return float("inf")
        if same(old, new):
            continue
        size = float(old.detach().abs().double().nan_to_num(posinf=0.0, neginf=0.0).max()) or 1.0
        gaps = (old.detach().double() - new.detach().double()).abs().nan_to_num(nan=float("inf"))
        worst = max(worst, float(gaps.max()) / size)
    return worst


def _equal(a: Tensor, b: Tensor) -> Tensor:
    return (a == b) | ((a != a) & (b != b))
