"""How far states are from each other: steps of one sequence, or the last states of several."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from ..errors import BadInput
from .canvas import SEQUENTIAL, color_bar, label_steps, new_ax, tidy
from .picture_data import UNITS, bounds_of, picked, readable

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from ..measure import Comparison, Positions


def distances(
    result: Positions | Comparison | Tensor | np.ndarray[Any, Any],
    ax: Axes | None = None,
    *,
    labels: Sequence[Any] | None = None,
    limits: float | tuple[float, float] | None = None,
) -> Axes:
    """Draw the distances of all pairs as a square and return the `ax`; beyond 400 every nth is shown, and said.

    Args:
        result: What `measure.positions` (pairs of steps) or `measure.compare` (pairs of rows) returned, or (n, n).
        ax: Where to draw; a new figure without it.
        labels: One for each row and column: tokens of the steps, or names of the inputs. A comparison has its own.
        limits: The ends of the color scale, (low, high), so that several pictures can be compared.

    >>> points = torch.randn(6, 3)
    >>> hs.plot.distances(torch.cdist(points, points)).get_xlabel()
    'row'
    """
    from ..measure import Comparison, Positions

    if isinstance(result, np.ndarray) and result.dtype.kind in "fiu":
        result = torch.tensor(result)
    square = result.distances if isinstance(result, Comparison | Positions) else result
    if not isinstance(square, Tensor) or square.dim() != 2 or square.shape[0] != square.shape[1]:
        seen = tuple(square.shape) if isinstance(square, Tensor) else type(result).__name__
        raise BadInput(
            f"distances are (n, n), or a result of measure.positions or measure.compare, but this is {seen}."
        )
    settles = result.settles_at if isinstance(result, Positions) else None
    what = "step" if isinstance(result, Positions) else "row"
    if labels is None and isinstance(result, Comparison):
        labels = result.labels
    names = None if labels is None else readable(labels, len(square), what="labels", of=what)
    low, high = bounds_of(limits) or (0.0, None)
    kept = picked(square.detach().to("cpu", torch.float32), UNITS, what=f"{what}s")
    shown = kept.values[:, kept.index]

    ax = new_ax(ax, size=(5.5, 4.5))
    every = 1 if len(kept.index) < 2 else int(kept.index[1])
    edge = len(shown) * every - 0.5
    look: Any = {"vmin": low, "vmax": high, "extent": (-0.5, edge, edge, -0.5), "interpolation": "nearest"}
    drawn = ax.imshow(shown.numpy(), cmap=SEQUENTIAL, **look)
    axis = f"{what} ({kept.note})" if kept.note else what
    tidy(ax, x=axis, y=axis)
    color_bar(ax, drawn, "distance")
    if settles is not None and 0 <= settles < len(square):
        ax.axvline(settles, color="white", linestyle="--", linewidth=1.2)
        ax.set_title(f"settles at step {settles} (dashed)", loc="left", fontsize="medium")
    if names:
        label_steps(ax.set_xticks, names, most=32, room=30)
        label_steps(lambda at, text, fontsize, **_: ax.set_yticks(at, text, fontsize=fontsize), names, most=32)
    return ax
