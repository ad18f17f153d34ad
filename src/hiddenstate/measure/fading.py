"""How fast a layer forgets its own state, for layers that their input does not move."""

from __future__ import annotations

import torch
from torch import Tensor

from .decay import by_lag, half_life
from .system import System


def fading(system: System, x: Tensor, ends: Tensor) -> float:
    """Return the half-life of a push to the state, as the layer's visible part at each row's end feels it."""
    width = system.places[0].shape.numel()
    vectors = system.initial(len(x))
    pushes, seen = [], []
    for step in x.detach().unbind(1):
        push = torch.zeros_like(vectors, requires_grad=True)
        vectors = system.step(step, vectors + push)
        pushes.append(push)
        seen.append(vectors[:, :width])
    last = torch.stack(seen, dim=1)[torch.arange(len(x), device=x.device), ends]  # (batch, unit)
    squares = torch.zeros(x.shape[:2], dtype=last.dtype, device=x.device)
    for unit in range(width):
        found = torch.autograd.grad(last[:, unit].sum(), pushes, retain_graph=True, allow_unused=True)
        squares += torch.stack([last.new_zeros(len(x)) if g is None else g.square().sum(1) for g in found], dim=1)
    return half_life(by_lag(squares.sqrt(), ends).nanmean(0))
