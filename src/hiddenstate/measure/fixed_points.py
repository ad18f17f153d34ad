"""Fixed points of a layer under a constant input, and their stability."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ..errors import BadInput
from ..state import shown_in_short
from .progress import tracked
from .system import System, at_rest
from .torch_system import as_system

_MERGE = 1e-3  # points that are this close in every coordinate are the same
_STEPS = 100  # for which a start is relaxed, or the layer wanders under random input
_CHUNK = 2**23  # numbers in the Jacobians that are held at once
_PATIENCE = 12  # steps in a row without much gain, after which a start is stuck in a minimum that is not zero


@shown_in_short
@dataclass(frozen=True, slots=True, eq=False)
class FixedPoints:
    """The states that lead to themselves, once each, beginning with those with the fewest unstable directions."""

    points: Tensor  # (n, S) h of each layer, then c of each layer, then other parts
    stable: Tensor  # (n,) bool: every eigenvalue is inside the unit circle
    eigenvalues: Tensor  # (n, S) complex, of the Jacobian there, largest first
    residuals: Tensor  # (n,) ‖F(s) - s‖
    unstable_directions: Tensor  # (n,) eigenvalues on or outside the unit circle
    hits: Tensor  # (n,) the number of starts that ended there
    starts: int
    tolerance: float
    interrupted: bool = False  # stopped by Ctrl-C: only the starts that had arrived by then count

    def __str__(self) -> str:
        """Return one line, and one for each of the first points."""
        stopped = ", interrupted" if self.interrupted else ""
        lines = [
            f"{len(self.points)} fixed points, {int(self.stable.sum())} of them stable, from {self.starts} starts "
            f"(‖F(s) - s‖ ≤ {self.tolerance:.0e}){stopped}"
        ]
        for index in range(min(len(self.points), 10)):
            kind = "stable" if self.stable[index] else f"{int(self.unstable_directions[index])} unstable directions"
            radius = float(self.eigenvalues[index].abs().max())
            lines.append(
                f"  {index}: {kind}, spectral radius {radius:.4g}, |s| = {float(self.points[index].norm()):.4g}, "
                f"reached by {int(self.hits[index])}"
            )
        return "\n".join(lines + ([f"  … and {len(self.points) - 10} more"] if len(self.points) > 10 else []))


def fixed_points(
    layer: nn.Module,
    x: Tensor | None = None,
    starts: int = 1024,
    seed: int = 0,
    *,
    states: Tensor | None = None,
    tolerance: float | None = None,
    iterations: int = 200,
) -> FixedPoints:
    """Return the states with F(x, s) = s, stable and unstable, each with the eigenvalues there.

    All starts are followed at once by damped Newton steps (Levenberg–Marquardt) on ‖F(s) - s‖².

    Args:
        layer: A recurrent layer of one direction.
        x: The constant input, (feature,); zeros by default.
        starts: The number of states to start from. A third each are random, relaxed by the layer itself, and visited by
            it under random input.
        seed: The seed of the starts.
        states: States (n, S) to start from instead, for example those of a trajectory.
        tolerance: A state counts as fixed if its ‖F(s) - s‖ is at most this.
        iterations: The largest number of Newton steps.

    >>> unit = torch.nn.RNN(1, 1, bias=False)
    >>> _ = unit.weight_hh_l0.data.fill_(2.0)
    >>> print(fixed_points(unit, starts=64))
    3 fixed points, 2 of them stable, from 64 starts (‖F(s) - s‖ ≤ 1e-10)
      0: stable, spectral radius 0.1664, |s| = 0.9575, reached by ...
    """
    system = as_system(layer).in_double()
    if states is None and starts < 1:
        raise BadInput(f"{starts} starts are asked for: one or more are needed.")
    with at_rest(system.layer.module):
        inputs = _constant_input(system, x)
        if tolerance is None:
            tolerance = 1e-10 if system.dtype == torch.float64 else 1e-5
        begin = _starting_points(system, inputs, starts, seed) if states is None else _given(system, states)
        search = _Search(system, inputs, begin, tolerance)
        interrupted = False
        try:
            for _ in tracked(search.run(iterations), "fixed points", iterations):
                pass
        except KeyboardInterrupt:
            interrupted = True
        found, residuals = search.arrived()
        points, residuals, hits = _distinct(found, residuals, system.smooth)
        eigenvalues = _eigenvalues(system, inputs, points)
    order = _order(points, eigenvalues)
    radius = eigenvalues[order].abs()
    return FixedPoints(
        points=points[order][:, system.smooth].to(system.layout[0].dtype.to_real()),
        stable=(radius < 1).all(1),
        eigenvalues=eigenvalues[order],
        residuals=residuals[order],
        unstable_directions=(radius >= 1).sum(1),
        hits=hits[order],
        starts=len(begin),
        tolerance=tolerance,
        interrupted=interrupted,
    )


def _constant_input(system: System, x: Tensor | None) -> Tensor:
    """Return the one constant input, (1, feature), or (1,) for a token; of a sequence, all steps must agree."""
    if x is None:
        return torch.zeros(1, system.features(), dtype=system.input_dtype, device=system.device)
    x = torch.as_tensor(x).detach()
    tokens = not (x.is_floating_point() or x.is_complex())
    x = x.reshape(-1) if tokens else x.reshape(-1, x.shape[-1] if x.dim() else 1)  # (step,) or (step, feature)
    if not len(x) or not bool((x == x[:1]).all()):
        raise BadInput(
            f"a fixed point needs a constant input, but x has {len(x)} steps that differ. Give one step, x (feature,), "
            f"and the states of a run as states=."
        )
    x = x[:1].to(system.device)
    width = system.spec.input_size
    if width is not None and not tokens and x.shape[1] != width:
        raise BadInput(f"x has {x.shape[1]} features, but this {type(system.layer.module).__name__} takes {width}.")
    return x if tokens else x.to(system.input_dtype)


def _given(system: System, states: Tensor) -> Tensor:
    flat = states.detach().reshape(-1, states.shape[-1]).to(system.device, system.dtype)
    if flat.shape[1] != system.size or not len(flat):
        raise BadInput(
            f"states have shape {tuple(states.shape)}, but (n, {system.size}) is needed: the whole state of the layer, "
            f"h of each of its layers, then c of each."
        )
    whole = system.initial(1).repeat(len(flat), 1)
    whole[:, system.smooth] = flat
    return whole


def _starting_points(system: System, x: Tensor, count: int, seed: int) -> Tensor:
    """Return `count` vectors: a third random, a third relaxed by the layer, a third visited under random input."""
    generator = torch.Generator().manual_seed(seed)
    third = -(-count // 3)
    visited = _finite(_wander(system, x, third, generator))
    # A tanh keeps h within ±1. If the layer itself goes further (c, relu), so do the starts.
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
    # Each start stops after a different number of steps: early ones are between the attractors, late ones on them.
    stops = torch.randint(1, _STEPS + 1, (len(states),), generator=generator).to(states.device)
    walked = states
    with torch.no_grad():
        for step in range(_STEPS):
            following = system.step(x.expand(len(states), *x.shape[1:]), walked)
            walked = torch.where((step < stops).unsqueeze(1), following, walked)
    return walked


def _finite(states: Tensor) -> Tensor:
    return states[states.isfinite().all(1) & (states.abs() < 1e6).all(1)]


class _Search:
    """Levenberg–Marquardt on ‖F(s) - s‖², for all starts in one batch.

    A Newton step is damped until it decreases the error. Near a zero, the damping vanishes and each step doubles the
    number of correct digits.
    """

    def __init__(self, system: System, x: Tensor, starts: Tensor, tolerance: float) -> None:
        """Begin at `starts (start, entry)` with the constant input `x`."""
        self.system, self.x, self.tolerance = system, x, tolerance
        self.states = starts.clone()
        self.misses = self._miss(starts)  # (start, S)
        self.damping = torch.full((len(starts),), 1e-2, dtype=torch.float64, device=starts.device)
        self.stalled = torch.zeros(len(starts), dtype=torch.int64, device=starts.device)
        self.polished = torch.zeros(len(starts), dtype=torch.bool, device=starts.device)

    def run(self, iterations: int) -> Iterator[None]:
        """Make a step from every start that is still on its way; yield after each step."""
        for _ in range(iterations):
            active = (~self.polished & (self.stalled < _PATIENCE)).nonzero().flatten()
            if not len(active):
                return
            stride = max(1, _CHUNK // self.system.size**2)
            for begin in range(0, len(active), stride):
                self._advance(active[begin : begin + stride])
            yield

    def arrived(self) -> tuple[Tensor, Tensor]:
        """Return the states that are fixed, with their residuals."""
        residuals = self.misses.norm(dim=1)
        fixed = residuals <= self.tolerance
        return self.states[fixed], residuals[fixed]

    def _advance(self, rows: Tensor) -> None:
        smooth = self.system.smooth
        miss = self.misses[rows].double()
        slope = self._slope(rows).double()
        square = slope.mT @ slope
        square.diagonal(dim1=1, dim2=2).add_(self.damping[rows].unsqueeze(1))
        step = torch.linalg.solve_ex(square, -(slope.mT @ miss.unsqueeze(2)))[0].squeeze(2)
        tried = self.states[rows].clone()
        tried[:, smooth] += step.to(tried.dtype)
        missed = self._miss(tried)
        before, after = miss.norm(dim=1), missed.double().norm(dim=1)
        better = after < before  # False for NaN
        self.states[rows[better]] = tried[better]
        self.misses[rows[better]] = missed[better]
        self.damping[rows] = torch.where(better, self.damping[rows] / 10, self.damping[rows] * 10).clamp(min=1e-14)
        self.stalled[rows] = torch.where(after < 0.98 * before, 0, self.stalled[rows] + 1)
        # Continue below the tolerance until rounding stops the descent: the last steps make the result precise.
        self.polished[rows] = (torch.minimum(before, after.nan_to_num(torch.inf)) <= self.tolerance) & (
            ~better | (after > before / 2) | (after == 0)
        )

    def _miss(self, states: Tensor) -> Tensor:
        with torch.no_grad():
            following = self.system.step(self.x.expand(len(states), *self.x.shape[1:]), states)
        return (following - states)[:, self.system.smooth]

    def _slope(self, rows: Tensor) -> Tensor:
        slope = self.system.jacobians(self.x.expand(len(rows), *self.x.shape[1:]), self.states[rows])
        slope.diagonal(dim1=1, dim2=2).sub_(1)
        return slope


def _distinct(points: Tensor, residuals: Tensor, smooth: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Keep the best of each group of points within `_MERGE` of it; return these points, and the sizes of the groups."""
    order = residuals.argsort()
    points, residuals = points[order], residuals[order]
    kept, hits = [], []
    left = torch.arange(len(points), device=points.device)
    while len(left):
        best = left[0]
        near = (points[left][:, smooth] - points[best, smooth]).abs().amax(1) <= _MERGE
        kept.append(best)
        hits.append(near.sum())
        left = left[~near]
    index = torch.stack(kept) if kept else left
    return points[index], residuals[index], torch.stack(hits) if hits else left


def _eigenvalues(system: System, x: Tensor, points: Tensor) -> Tensor:
    complex_ = system.dtype.to_complex() if system.dtype in (torch.float32, torch.float64) else torch.complex64
    if not len(points):
        return torch.zeros(0, system.size, dtype=complex_, device=points.device)
    found: Tensor = torch.linalg.eigvals(
        system.jacobians(x.expand(len(points), *x.shape[1:]), points).to(complex_.to_real())
    )
    return found.gather(-1, found.abs().argsort(-1, descending=True))


def _order(points: Tensor, eigenvalues: Tensor) -> Tensor:
    unstable = (eigenvalues.abs() >= 1).sum(1).tolist()
    keys = [(count, *point) for count, point in zip(unstable, points.tolist(), strict=True)]
    return torch.tensor(sorted(range(len(keys)), key=keys.__getitem__), dtype=torch.int64, device=points.device)
