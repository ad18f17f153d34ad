"""Other values to put in place of a model's input: different, yet such as the model may meet."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from .inputs import Inputs


def other_steps(x: Tensor, mask: Tensor, inputs: Inputs, *, seed: int) -> Tensor:
    """Return `x (batch, time, ...)` with the steps in `mask (batch, time)` holding other values.

    They come from other places of the same tensor, so that they are of its kind: counts stay counts.
    """
    generator = torch.Generator().manual_seed(seed)
    where = mask.to(x.device)
    if x.is_floating_point() or x.is_complex():
        new = _other_floats(x, generator)
    elif x.dtype == torch.bool:
        return x
    else:
        new = _other_tokens(x, inputs, generator)
        if inputs.pad_token is not None and x.dim() == 2:
            where = where & (x != inputs.pad_token)  # moving a padding token would change how long a row is
    return torch.where(where.reshape(*where.shape, *[1] * (x.dim() - 2)), new, x)


def spread(x: Tensor) -> float:
    """Return how far the values of a tensor vary, 1 where they do not."""
    return (float(x.detach().std()) if x.numel() > 1 else 0.0) or 1.0


def another_state(state: Tensor, seed: int) -> Tensor:
    """Return a state unlike this one, within the bounds of a tanh."""
    if not state.is_floating_point():
        return state
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randn(state.shape, generator=generator, dtype=torch.float64).to(state)
    return (0.5 * state + 0.5 * noise).clamp(-0.9, 0.9)


def _other_floats(x: Tensor, generator: torch.Generator) -> Tensor:
    steps = x.detach().reshape(x.shape[0] * x.shape[1], -1)
    order = torch.randperm(len(steps), generator=generator).to(x.device)
    new = steps[order].reshape(x.shape)
    finite = steps[steps.isfinite()]
    if x.is_complex():
        return new + torch.randn(x.shape, generator=generator, dtype=torch.complex128).to(x)
    varied = float(finite.std()) if finite.numel() > 1 else 0.0
    if varied > 0 and bool((finite == finite.round()).all()):
        return _unlike(x, new, steps, generator)  # counts, marks, one-hot rows: noise would make them something else
    noise = torch.randn(x.shape, generator=generator, dtype=torch.float64).to(x)
    new = new + (0.5 * varied or 1.0) * noise
    if finite.numel() and varied > 0 and float(finite.min()) >= 0:
        new = new.abs()  # probabilities, durations, magnitudes
        if float(finite.max()) <= 1:
            new = new.clamp(max=1.0)
    return new


def _unlike(x: Tensor, new: Tensor, steps: Tensor, generator: torch.Generator) -> Tensor:
    for _ in range(4):
        same = (new == x).flatten(2).all(2) if x.dim() > 2 else new == x  # (batch, time)
        if not bool(same.any()):
            break
        again = steps[torch.randint(len(steps), (len(steps),), generator=generator).to(x.device)].reshape(x.shape)
        new = torch.where(same.reshape(*same.shape, *[1] * (x.dim() - 2)), again, new)
    return new


def _other_tokens(x: Tensor, inputs: Inputs, generator: torch.Generator) -> Tensor:
    top = inputs.vocabulary if inputs.vocabulary is not None else int(x.max()) + 1
    known = torch.unique(x)
    if inputs.pad_token is not None:
        known = known[known != inputs.pad_token]
    if len(known) < 2:
        low = 1 if top > 2 and (inputs.pad_token == 0 or inputs.pad_token is None) else 0
        known = torch.arange(low, max(top, low + 1), device=x.device, dtype=x.dtype)
    drawn = known[torch.randint(len(known), x.shape, generator=generator).to(x.device)]
    for _ in range(6):
        same = drawn == x
        if not bool(same.any()):
            break
        drawn = torch.where(same, known[torch.randint(len(known), x.shape, generator=generator).to(x.device)], drawn)
    return drawn  # type: ignore[no-any-return]
