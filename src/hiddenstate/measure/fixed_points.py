"""Where a layer's dynamics stand still under a constant input, and whether they stay there."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ..errors import BadInput
from .progress import tracked
from .rest import at_rest
from .solving import Search
from .starting import starting_points
from .system import System
from .torch_system import as_system

_MERGE = 1e-3  # points closer than this in every coordinate are one


@dataclass(frozen=True, slots=True, eq=False)
class FixedPoints:
    """States that lead to themselves, each once; those with the fewest unstable directions first."""

    points: Tensor  # (n, S) h of each layer, then c of each layer, then further parts
    stable: Tensor  # (n,) bool: every eigenvalue is inside the unit circle
    eigenvalues: Tensor  # (n, S) complex, of the Jacobian there, largest first
    residuals: Tensor  # (n,) ‖F(s) - s‖
    unstable_directions: Tensor  # (n,) eigenvalues on or outside the unit circle
    hits: Tensor  # (n,) starts that ended there
    starts: int
    tolerance: float
    interrupted: bool = False  # stopped by Ctrl-C: from the starts that had arrived by then

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
        starts: How many states to start from: a third each at random, relaxed by the layer itself, and visited by it
            under random input.
        seed: Of the starts.
        states: States (n, S) to start from instead, for example those of a trajectory.
        tolerance: The ‖F(s) - s‖ up to which a state counts as fixed.
        iterations: The most Newton steps of a start.

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
        inputs = constant_input(system, x)
        if tolerance is None:
            tolerance = 1e-10 if system.dtype == torch.float64 else 1e-5
        begin = starting_points(system, inputs, starts, seed) if states is None else _given(system, states)
        search = Search(system, inputs, begin, tolerance)
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
        points=points[order][:, system.smooth].to(_own_dtype(system)),
        stable=(radius < 1).all(1),
        eigenvalues=eigenvalues[order],
        residuals=residuals[order],
        unstable_directions=(radius >= 1).sum(1),
        hits=hits[order],
        starts=len(begin),
        tolerance=tolerance,
        interrupted=interrupted,
    )


def constant_input(system: System, x: Tensor | None) -> Tensor:
    """Return the one input (1, feature), or (1,) of a token, that stays; a sequence counts if all its steps agree."""
    if x is None:
        width = system.spec.input_size
        if width is None:
            raise BadInput(
                f"how many features {type(system.layer.module).__name__} takes is unknown: give x (feature,), "
                f"the constant input, or the cell an input_size."
            )
        return torch.zeros(1, width, dtype=system.input_dtype, device=system.device)
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


def _distinct(points: Tensor, residuals: Tensor, smooth: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Keep the best of each group of points that lie within `_MERGE` of it; return them, and the sizes of groups."""
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


def _own_dtype(system: System) -> torch.dtype:
    return system.places[0].dtype.to_real()
