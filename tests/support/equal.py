"""Two ways of computing one thing: equal in values and in all gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn

TIGHT = {"rtol": 1e-9, "atol": 1e-11}


def values_and_gradients(
    run: Callable[[], Iterable[Tensor]], wanted: Iterable[Tensor], seed: int = 0
) -> tuple[list[Tensor], list[Tensor]]:
    """Run, weigh every output with fixed random numbers, and return outputs and gradients of the wanted tensors."""
    wanted = list(wanted)
    values = list(run())
    generator = torch.Generator().manual_seed(seed)
    weights = [torch.randn(value.shape, generator=generator, dtype=value.dtype).to(value.device) for value in values]
    loss = torch.stack([(value * weight).sum() for value, weight in zip(values, weights, strict=True)]).sum()
    gradients = torch.autograd.grad(loss, wanted, allow_unused=True)
    filled = [torch.zeros_like(w) if g is None else g for w, g in zip(wanted, gradients, strict=True)]
    return [value.detach() for value in values], filled


def assert_same(
    one: Callable[[], Iterable[Tensor]],
    other: Callable[[], Iterable[Tensor]],
    wanted: Iterable[Tensor],
    **tolerance: float,
) -> None:
    """Both give the same values, and the same gradients for all wanted tensors."""
    wanted = list(wanted)
    for left, right in zip(values_and_gradients(one, wanted), values_and_gradients(other, wanted), strict=True):
        torch.testing.assert_close(left, right, **(tolerance or TIGHT))


def inputs_of(module: nn.Module, *tensors: Tensor) -> list[Tensor]:
    """All parameters of a module, and those of the tensors that can have a gradient."""
    return [*module.parameters(), *(t.requires_grad_() for t in tensors if t.is_floating_point())]
