"""The size of d output / d input at every step: by closed forms for torch's layers, by autograd for all else."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from ..errors import BadInput
from .leaf import Leaf
from .outputs import at_steps
from .progress import tracked
from .torch_system import TorchSystem

_EXACT = 64  # outputs up to which every one of them is differentiated
_PROBES = 16  # random directions of the output beyond that
_CHUNK = 2**19  # numbers in the Jacobians that are held at once: as many as a cache holds


@dataclass(frozen=True, slots=True, eq=False)
class Sensitivity:
    """‖d output / d input‖² at each step."""

    squares: Tensor  # (batch, time) float64; NaN where an interruption came before
    exact: bool  # all outputs were differentiated, rather than random directions
    interrupted: bool


def by_autograd(y: Tensor, leaf: Leaf, probes: int | None) -> Sensitivity:
    """Go back from `y (batch, unit)` once for each unit or direction, all rows at once."""
    units = y.shape[1]
    if not y.requires_grad:
        leaf.squares(y.detach().requires_grad_().sum())  # says so where tokens were never embedded
        raise BadInput(
            "the output does not depend on the input in a way that has a gradient. Often it is computed under "
            "torch.no_grad(), detached, or rounded on the way: measure an earlier output, with output=."
        )
    if not units:
        raise BadInput("the output has no units: there is nothing to differentiate.")
    exact, count = _plan(units, probes)
    total, done, interrupted = torch.zeros(()), 0, False
    try:
        for direction in tracked(_directions(y, count, exact), "memory", count):
            total = total.to(y.device) + leaf.squares((y * direction).sum())
            done += 1
    except KeyboardInterrupt:
        if not done:
            raise
        interrupted = True
    return Sensitivity(total * (units / done if exact else 1 / done), exact and not interrupted, interrupted)


def by_closed_form(
    system: TorchSystem, x: Tensor, valid: Tensor, ends: Tensor, *, probes: int | None = None
) -> Sensitivity:
    """Go back from the visible part of each row's state at `ends`, through the Jacobians of all steps."""
    start = system.initial(len(x))
    states = system.walk(x, start)  # (batch, time, S)
    top = system.levels[-1].h
    y = at_steps(states[..., top], ends, valid, time_axis=1)
    exact, count = _plan(y.shape[1], probes)
    goal = y.new_zeros(len(x), count, system.size)  # d (chosen outputs) / d state at the end
    goal[..., top] = torch.stack([d.expand_as(y) for d in _directions(y, count, exact)], dim=1)
    before = torch.cat([start.unsqueeze(1), states[:, :-1]], dim=1)
    squares = y.new_full(x.shape[:2], torch.nan, dtype=torch.float64)  # squares of small numbers need its range
    reached, interrupted = torch.zeros_like(goal), False
    last = int(ends.max())
    try:
        for step, jacobian in tracked(_backwards(system, x, before, last), "memory", last + 1):
            begins = ends == step
            if bool(begins.any()):
                reached = torch.where(begins[:, None, None], goal, reached)
            pulled = reached @ jacobian  # (batch, count, S + feature)
            squares[:, step] = pulled[..., system.size :].double().square().sum((1, 2))
            reached = pulled[..., : system.size]
    except KeyboardInterrupt:
        if bool(squares.isnan().all()):
            raise
        interrupted = True
    return Sensitivity(squares * (1 if exact else 1 / count), exact, interrupted)


def _backwards(system: TorchSystem, x: Tensor, before: Tensor, last: int) -> Iterator[tuple[int, Tensor]]:
    """Yield the steps from `last` to 0, each with d next / d (state, input) there: (batch, S, S + feature)."""
    x, before = x.transpose(0, 1), before.transpose(0, 1)  # by time, so that one step lies together in memory
    stride = max(1, _CHUNK // (x.shape[1] * system.size * (system.size + x.shape[2])))
    for end in range(last + 1, 0, -stride):
        begin = max(0, end - stride)
        found = system.whole_jacobians(x[begin:end].flatten(0, 1), before[begin:end].flatten(0, 1))
        found = found.reshape(end - begin, -1, *found.shape[1:])
        for step in range(end - 1, begin - 1, -1):
            yield step, found[step - begin]


def _plan(units: int, probes: int | None) -> tuple[bool, int]:
    exact = units <= _EXACT and probes is None
    return exact, units if exact else probes or _PROBES


def _directions(y: Tensor, count: int, exact: bool) -> Iterator[Tensor]:
    generator = torch.Generator().manual_seed(0)  # of its own: the user's random stream stays as it is
    for unit in range(count):
        if exact:
            yield torch.nn.functional.one_hot(torch.tensor(unit, device=y.device), y.shape[1]).to(y.dtype)
        else:
            yield torch.randn(y.shape, generator=generator, dtype=torch.float64).to(y)
