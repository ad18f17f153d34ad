"""Attention weights over steps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from ..errors import BadInput
from .canvas import COLORS, SEQUENTIAL, color_bar, label_steps, new_ax, tidy
from .picture_data import STEPS, averaged, bounds_of, readable

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from ..measure import AttentionWeights


def attention(
    weights: Tensor | np.ndarray[Any, Any] | AttentionWeights | tuple[AttentionWeights, ...],
    ax: Axes | None = None,
    *,
    row: int = 0,
    tokens: Sequence[str] | None = None,
    labels: Sequence[str] | None = None,
    limits: float | tuple[float, float] | None = None,
) -> Axes:
    """Draw the weight of each step, as bars for one row and as a map for several, and return the `ax`.

    Args:
        weights: (time,) for one row, or (row, time): rows of a batch, heads, or steps of a decoder. Or a result of
            `measure.attention`: if each row has one look, all rows are drawn, else the looks of one row.
        ax: Where to draw; by default in a new figure.
        row: Whose looks are drawn, if `weights` is a result of `measure.attention`.
        tokens: One label for each step.
        labels: One label for each row.
        limits: The ends of the scale, so that several pictures can be compared: (0, 1).

    >>> ax = hs.plot.attention(torch.randn(12).softmax(0), tokens=list("hidden state"))
    >>> ax.get_ylabel()
    'weight'
    """
    weights, what, of = _of_result(weights, row)
    if isinstance(weights, np.ndarray) and weights.dtype.kind == "f":
        weights = torch.tensor(weights)
    if not isinstance(weights, Tensor) or weights.dim() not in (1, 2):
        seen = tuple(weights.shape) if isinstance(weights, Tensor) else type(weights).__name__
        raise BadInput(
            f"attention weights are (time,) or (row, time), but this is {seen}. "
            f"Of (batch, head, time) choose one row: weights[0]."
        )
    table = weights.detach().to("cpu", torch.float32).reshape(-1, weights.shape[-1])  # (row, time)
    ends = bounds_of(limits)
    names = None if tokens is None else readable(tokens, table.shape[1])
    if labels is not None and len(labels) != len(table):
        raise BadInput(f"there are {len(labels)} labels, but {len(table)} {what}s: one for each {what} is needed.")
    steps = averaged(torch.where(table.isfinite(), table, torch.nan), STEPS, axis=1)
    x = f"step ({steps.note})" if steps.note else "step"
    bad = int((~table.isfinite()).sum())
    said = " · ".join(
        text for text in (of, f"{bad:,} of {table.numel():,} weights are NaN or Inf" if bad else "") if text
    )
    ax = new_ax(ax, size=(8.0, 3.0 if len(table) == 1 else 4.0))
    if len(table) == 1:
        wide = 1 if len(steps.index) < 2 else int(steps.index[1])
        ax.bar((steps.index + (wide - 1) / 2).numpy(), steps.values[0].numpy(), color=COLORS[0], width=0.85 * wide)
        title = " · ".join(text for text in ("" if labels is None else str(labels[0]), said) if text)
        tidy(ax, x=x, y="weight", title=title)
        ax.margins(x=0.01)
        if ends is not None:
            ax.set_ylim(ends)
    else:
        extent = (-0.5, table.shape[1] - 0.5, len(table) - 0.5, -0.5)
        how: dict[str, Any] = {
            "cmap": SEQUENTIAL,
            "vmin": 0 if ends is None else ends[0],
            "vmax": None if ends is None else ends[1],
            "aspect": "auto",
            "interpolation": "nearest",
            "extent": extent,
        }
        color_bar(ax, ax.imshow(steps.values.numpy(), **how), "weight")
        tidy(ax, x=x, y=what, title=said)
        if labels is not None:
            label_steps(lambda at, text, fontsize, **_: ax.set_yticks(at, text, fontsize=fontsize), list(labels))
    if names:
        label_steps(ax.set_xticks, names)
    return ax


def _of_result(given: Any, row: int) -> tuple[Any, str, str]:
    """Return weights as a table, what its lines are, and of which row; what is no result of a measure as it is."""
    from ..measure import AttentionWeights

    if isinstance(given, tuple) and given and all(isinstance(one, AttentionWeights) for one in given):
        if len(given) > 1:
            made = ", ".join(f"{number} at {one.where}" for number, one in enumerate(given))
            raise BadInput(f"{len(given)} lines of code made weights ({made}): draw one of them, found[0].")
        (given,) = given
    if not isinstance(given, AttentionWeights):
        return given, "row", ""
    rows, looks, _ = given.weights.shape
    if not -rows <= row < rows:
        raise BadInput(f"row {row} was asked for, but there are weights of {rows} rows.")
    if looks == 1:
        return given.weights[:, 0], "row", ""
    return given.weights[row], "look", f"row {row % rows}" if rows > 1 else ""
