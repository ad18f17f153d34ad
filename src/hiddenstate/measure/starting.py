"""Where a search for fixed points begins: all over the space of states, and where the layer really goes."""

from __future__ import annotations

import torch
from torch import Tensor

from .system import System

_STEPS = 100  # of relaxing, and of wandering under random input


def starting_points(system: System, x: Tensor, count: int, seed: int) -> Tensor:
    """Return `count` vectors: a third at random, a third relaxed by the layer, a third visited under random input."""
    generator = torch.Generator().manual_seed(seed)
    third = -(-count // 3)
    visited = _finite(_wander(system, x, third, generator))
    # A tanh keeps h within ±1; where the layer itself goes further (c, relu), so do the starts.
    reach = visited.abs().amax(0).mul(1.5).clamp(1, 1e3) if len(visited) else torch.ones(len(system.smooth)).to(x)
    anywhere = system.initial(2 * third)
    noise = torch.rand(2 * third, system.size, generator=generator, dtype=torch.float64) * 2 - 1
    anywhere[:, system.smooth] = noise.to(anywhere) * reach.to(anywhere)[system.smooth]
    relaxed = _relax(system, x, anywhere[third:], generator)
    return _finite(torch.cat([anywhere[:third], relaxed, visited]))[:count]


def _wander(system: System, x: Tensor, count: int, generator: torch.Generator) -> Tensor:
    rows = min(count, 32)
    inputs = x.unsqueeze(1).expand(rows, _STEPS, *x.shape[1:])
    if x.is_floating_point():
        inputs = inputs + torch.randn(inputs.shape, generator=generator, dtype=torch.float64).to(inputs)
    states = system.walk(inputs, system.initial(rows)).flatten(0, 1)
    pick = torch.randperm(len(states), generator=generator)[:count]
    return states[pick.to(states.device)]


def _relax(system: System, x: Tensor, states: Tensor, generator: torch.Generator) -> Tensor:
    # Each start stops after a number of steps of its own: early ones lie between the attractors, late ones on them.
    stops = torch.randint(1, _STEPS + 1, (len(states),), generator=generator).to(states.device)
    walked = states
    with torch.no_grad():
        for step in range(_STEPS):
            following = system.step(x.expand(len(states), *x.shape[1:]), walked)
            walked = torch.where((step < stops).unsqueeze(1), following, walked)
    return walked


def _finite(states: Tensor) -> Tensor:
    return states[states.isfinite().all(1) & (states.abs() < 1e6).all(1)]
