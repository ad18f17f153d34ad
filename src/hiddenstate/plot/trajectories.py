"""The paths of states in the plane in which they differ most, with time as color."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from torch import Tensor

from ..errors import BadInput
from ..recording import Recording, Trajectory, the_track
from .canvas import MUTED, TIME, color_bar, new_ax, plain, tidy
from .picture_data import jumps, one_row, picked
from .projection import Projection, project

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_ROWS = 24  # more paths would be a tangle
_POINTS = 2000  # of one path


def trajectories(
    traj: Trajectory | Recording | Tensor | Sequence[Trajectory | Tensor],
    ax: Axes | None = None,
    *,
    part: str = "h",
    labels: Sequence[str] | None = None,
    components: int = 2,
) -> Axes:
    """Draw the path of each row in the plane of the main differences, with time as color, and return the `ax`.

    A circle marks where a path begins, a square where it ends. All paths share one projection. States that jump around,
    as those of language models do, are drawn as points without lines, and the title says so.

    Args:
        traj: A trajectory, a recording of one track, a tensor (batch, time, unit), or several with the same units.
        ax: Where to draw, 3-D for `components=3`; by default in a new figure.
        part: `h`, `c`, another part of the state, or a gate.
        labels: One for each row, written at the end of its path.
        components: 2 or 3 axes.

    >>> ax = hs.plot.trajectories(torch.randn(3, 50, 8).cumsum(1), labels=["a", "b", "c"])
    >>> ax.get_xlabel()[:4]
    'PC 1'
    """
    if components not in (2, 3):
        raise BadInput(f"paths are drawn in 2 or 3 components, but {components!r} were asked for.")
    paths = paths_of(traj, part)
    if labels is not None and len(labels) != len(paths):
        raise BadInput(f"there are {len(labels)} labels, but {len(paths)} rows: one for each row is needed.")
    plane = project(torch.cat(paths), components)
    shown = picked(torch.arange(len(paths)), _ROWS, what="rows")

    ax = new_ax(ax, size=(6.5, 5.0), depth=components == 3)
    if (getattr(ax, "name", "") == "3d") != (components == 3):
        raise BadInput(f"{components} components need a {'3-D' if components == 3 else 'plain'} ax, which this is not.")
    longest = max(len(path) for path in paths)
    tangled = jumps(paths)
    notes = [shown.note, plane.note, "no lines: states jump from step to step" if tangled else ""]
    if all(bool((path == path[0]).all()) for path in paths):
        notes.append("no path: the states do not move")
    for row in shown.values.tolist():
        points = picked(paths[row], _POINTS, what="steps")
        notes.append(points.note)
        _path(ax, plane(points.values), points.index, longest=longest, line=not tangled)
        if labels is not None:
            _write(ax, plane(paths[row][-1]).tolist(), labels[row])
    _finish(ax, plane, longest=longest, notes=[note for note in dict.fromkeys(notes) if note])
    return ax


def paths_of(traj: Trajectory | Recording | Tensor | Sequence[Trajectory | Tensor], part: str) -> list[Tensor]:
    """Return the path of each row that has a step, (time, unit), without padding."""
    given = the_track(traj)
    several: list[Any] = list(given) if isinstance(given, list | tuple) else [given]
    paths = []
    for one in several:
        known = isinstance(one, Tensor | np.ndarray) and one.ndim == 3
        rows = one.h.shape[0] if isinstance(one, Trajectory) else len(one) if known else 1
        paths += [one_row(one, part=part, row=row) for row in range(rows)]  # raises for anything else
    paths = [path for path in paths if len(path)]
    if not paths:
        raise BadInput("there is no row with a step in it: nothing can be drawn.")
    if len(sizes := {path.shape[1] for path in paths}) > 1:
        raise BadInput(f"paths in one picture have the same units, but these have {sorted(sizes)}.")
    return paths


def _path(ax: Axes, points: Tensor, steps: Tensor, *, longest: int, line: bool) -> None:
    from matplotlib import colormaps
    from matplotlib.collections import LineCollection
    from mpl_toolkits.mplot3d.art3d import Line3DCollection  # type: ignore[import-untyped]

    flat = points.shape[1] == 2
    segments = torch.stack([points[:-1], points[1:]], dim=1).numpy()  # (time - 1, 2, component)
    shade = (steps.float() / max(1, longest - 1)).numpy()
    colors = colormaps[TIME](shade)
    kind: Any = LineCollection if flat else Line3DCollection
    if not line:
        cast(Any, ax).scatter(*points.T.numpy(), color=colors, s=8, alpha=0.6, linewidths=0)
    elif flat:
        ax.add_collection(kind(segments, colors=colors[1:], linewidths=1.4, capstyle="round"))
    else:
        cast(Any, ax).add_collection3d(kind(segments, colors=colors[1:], linewidths=1.4, capstyle="round"))
    ends = points[[0, -1]].numpy()
    for point, color, marker in zip(ends, colors[[0, -1]], "os", strict=True):
        place: tuple[Any, ...] = tuple([value] for value in point)
        cast(Any, ax).scatter(*place, color=[color], marker=marker, s=28, edgecolors="white", zorder=3)


def _write(ax: Any, point: list[float], label: str) -> None:
    ax.text(*point, plain(f"  {label}"), fontsize="small", va="center")


def _finish(ax: Axes, plane: Projection, *, longest: int, notes: list[str]) -> None:
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import Normalize

    tidy(ax, x=plane.label(0), y=plane.label(1), title="; ".join(notes))
    ax.title.set_color(MUTED)
    if hasattr(ax, "set_zlabel"):
        ax.set_zlabel(plane.label(2))
    else:
        ax.autoscale_view()
    color_bar(ax, ScalarMappable(Normalize(0, max(1, longest - 1)), TIME), "step (○ start, □ end)")
