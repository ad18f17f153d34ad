"""Fixed points of a layer, in the plane in which they differ most."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..errors import BadInput
from ..recording import Trajectory
from .canvas import COLORS, MUTED, new_ax, tidy
from .picture_data import of_kind, picked
from .projection import project
from .trajectories import paths_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from ..measure import FixedPoints

_ROWS = 24


def fixed_points(result: FixedPoints, ax: Axes | None = None, *, traj: Trajectory | Tensor | None = None) -> Axes:
    """Draw stable points filled and unstable ones hollow, on top of paths if `traj` is given; return the `ax`.

    Args:
        result: What `measure.fixed_points` returned.
        ax: Where to draw; by default in a new figure.
        traj: States to draw as thin paths underneath. They have as many units as the points (or as h, for (h, c)).

    >>> found = hs.measure.fixed_points(torch.nn.GRU(2, 4, batch_first=True), starts=32)
    >>> hs.plot.fixed_points(found).get_xlabel()[:4]
    'PC 1'
    """
    of_kind(result, "FixedPoints", "measure.fixed_points")
    points, stable = result.points.detach().float().cpu(), result.stable.detach().bool().cpu()
    paths = [] if traj is None else paths_of(traj, "h")
    if paths:
        points = _same_units(points, paths[0].shape[1])
    ax = new_ax(ax, size=(6.0, 5.0))
    if not len(points) and not paths:
        tidy(ax, title="no fixed points found")
        return ax
    plane = project(torch.cat([points, *paths]))
    shown = picked(torch.arange(len(paths)), _ROWS, what="rows")
    for row in shown.values.tolist():
        line = plane(paths[row]).T.numpy()
        ax.plot(line[0], line[1], color=MUTED, linewidth=0.6, alpha=0.5, zorder=1)
    for mask, face, name in ((stable, COLORS[0], "stable"), (~stable, "none", "unstable")):
        if bool(mask.any()):
            x, y = plane(points[mask]).T.numpy()
            edge = COLORS[0] if name == "stable" else COLORS[1]
            label = f"{int(mask.sum())} {name}"
            ax.scatter(x, y, s=46, facecolors=face, edgecolors=edge, linewidths=1.6, label=label, zorder=3)
    tidy(ax, x=plane.label(0), y=plane.label(1), title=f"paths: {shown.note}" if shown.note else "")
    if len(points):
        ax.legend(frameon=False)
    return ax


def _same_units(points: Tensor, units: int) -> Tensor:
    """Return the h part of points that are whole states (h before c) if the paths are of h alone."""
    if points.shape[1] < units:
        raise BadInput(f"the points have {points.shape[1]} coordinates, but the trajectory has {units} units.")
    return points[:, :units]
