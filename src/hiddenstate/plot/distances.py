"""The distances between states: of the steps of one sequence, or of the last states of several."""

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

_NAMES = 48  # more names than this cannot be read
_LINE = 0.15  # inches from one name to the next


def distances(
    result: Positions | Comparison | Tensor | np.ndarray[Any, Any],
    ax: Axes | None = None,
    *,
    labels: Sequence[Any] | None = None,
    limits: float | tuple[float, float] | None = None,
) -> Axes:
    """Draw the distances of all pairs as a square, and return the `ax`. Beyond 400, every nth is shown, with a note.

    Args:
        result: What `measure.positions` (pairs of steps) or `measure.compare` (pairs of rows) returned, or (n, n).
        ax: Where to draw; by default in a new figure.
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
            f"distances are (n, n), or a result of measure.positions or measure.compare, but this is {seen}. "
            f"Those of states are measured first: hs.plot.distances(hs.measure.compare(states))."
        )
    settles = result.settles_at if isinstance(result, Positions) else None
    what = "step" if isinstance(result, Positions) else "row"
    if labels is None and isinstance(result, Comparison):
        labels = result.labels
    names = None if labels is None else readable(labels, len(square), what="labels", of=what)
    low, high = bounds_of(limits) or (0.0, None)
    kept = picked(square.detach().to("cpu", torch.float32), UNITS, what=f"{what}s")
    shown = kept.values[:, kept.index]

    ax = new_ax(ax, size=(5.5, 4.5) if names is None else _size(names))
    every = 1 if len(kept.index) < 2 else int(kept.index[1])
    edge = len(shown) * every - 0.5
    look: Any = {"vmin": low, "vmax": high, "extent": (-0.5, edge, edge, -0.5), "interpolation": "nearest"}
    drawn = ax.imshow(shown.numpy(), cmap=SEQUENTIAL, **look)
    most = len(square) if names is None else _fitting(ax)
    named = picked(square, most, what="names").note
    said = "; ".join(note for note in (kept.note, named) if note)
    axis = f"{what} ({said})" if said else what
    tidy(ax, x=axis, y=axis)
    if len(square) > 1 and not bool(square.any()):
        drawn.set_clim(low, 1.0 if high is None else high)
        ax.set_title("all distances are 0", loc="left", fontsize="medium")
    color_bar(ax, drawn, "distance")
    if settles is not None and 0 <= settles < len(square):
        ax.axvline(settles, color="white", linestyle="--", linewidth=1.2)
        ax.set_title(f"settles at step {settles} (dashed)", loc="left", fontsize="medium")
    if names:
        label_steps(ax.set_xticks, names, most=most, room=30)
        label_steps(lambda at, text, fontsize, **_: ax.set_yticks(at, text, fontsize=fontsize), names, most=most)
    return ax


def _size(names: list[str]) -> tuple[float, float]:
    """Return the size in inches of a square with these names on two sides."""
    square = max(3.2, _LINE * min(len(names), _NAMES))
    beside = 0.07 * min(24, max(map(len, names), default=0))
    return square + beside + 1.6, square + beside + 0.8


def _fitting(ax: Axes) -> int:
    """Return how many names fit one below another beside `ax`."""
    figure = ax.get_figure()
    assert figure is not None
    if (layout := figure.figure.get_layout_engine()) is not None:
        layout.execute(figure.figure)
    return max(1, min(_NAMES, int(ax.get_window_extent().height / figure.dpi / _LINE)))
