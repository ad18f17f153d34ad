"""A heatmap of units along time: the first picture of a state to look at."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from torch import Tensor

from ..errors import BadInput
from ..recording import Recording, Trajectory, the_track
from .canvas import DIVERGING, SEQUENTIAL, color_bar, label_steps, new_ax, tidy
from .picture_data import STEPS, UNITS, averaged, bounds_of, one_row, picked, readable, which_row
from .projection import principal

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Order = Literal["size", "peak", "similar"]


def heatmap(
    traj: Trajectory | Recording | Tensor | np.ndarray[Any, Any],
    ax: Axes | None = None,
    *,
    part: str = "h",
    row: int = 0,
    tokens: Sequence[str] | None = None,
    order: Order | Sequence[int] | None = None,
    limits: float | tuple[float, float] | None = None,
    log: bool = False,
) -> Axes:
    """Draw the units of one row along time, blue below zero and red above, and return the `ax`.

    Beyond 400 units, every nth is shown; beyond 800 steps, each column is the mean of several. The axes then say so.
    NaN and Inf are black, and the title counts them.

    Args:
        traj: A trajectory, a recording of one track, or a tensor (batch, time, unit) or (time, unit).
        ax: Where to draw; by default in a new figure.
        part: `h`, `c`, another part of the state, a gate, or the gradient of a part, `grads.h`.
        row: Which sequence of the batch.
        tokens: One label for each step of that row.
        order: Units by mean `size`, by the step of their `peak`, with `similar` ones side by side, or in a given order.
        limits: The ends of the color scale, so that several pictures can be compared: 1, for -1 to 1, or (low, high).
        log: Draw magnitudes on a log scale: gradients that fade by powers of ten stay visible.

    >>> ax = hs.plot.heatmap(torch.randn(1, 20, 8).tanh(), tokens=list("the state of a thing"))
    >>> ax.get_xlabel(), ax.get_ylabel()
    ('step', 'unit')
    """
    walk: Trajectory | Tensor | np.ndarray[Any, Any] = the_track(traj)
    values = one_row(walk, part=part, row=row)  # (time, unit)
    labels = None if tokens is None else readable(tokens, len(values))
    ends = bounds_of(limits)
    if log and ends is not None and ends[0] <= 0:
        raise BadInput(f"a log scale begins above 0, but limits are {limits!r}: limits=(1e-8, 1).")
    turn = None if order is None else ordered(values, order)
    units = picked(values if turn is None else values[:, turn], UNITS, axis=1)
    steps = averaged(units.values, STEPS)
    shown = steps.values.T  # (unit, time)
    every = walk.every if isinstance(walk, Trajectory) else 1

    ax = new_ax(ax, size=(8.0, 4.0))
    scale = _sizes(shown, ends) if log else _values(shown, ends)
    if log:  # zero has no logarithm: it is drawn like the smallest value
        shown = shown.abs().clamp(min=scale["norm"].vmin)
    drawn = _image(ax, shown, scale, steps=len(values) * every, units=values.shape[1])
    name = walk.track if isinstance(walk, Trajectory) else ""
    tidy(
        ax,
        title=_title(name, part, which_row(walk, row), values),
        x="step",
        y="unit" if order is None else f"unit, {_order(order)}",
    )
    ax.set_xlabel(f"step ({steps.note})" if steps.note else "step")
    ax.set_ylabel(f"{ax.get_ylabel()} ({units.note})" if units.note else ax.get_ylabel())
    color_bar(ax, drawn, f"|{part}|" if log else part)
    if labels:
        label_steps(lambda at, text, **how: ax.set_xticks([place * every for place in at], text, **how), labels)
    if turn is not None and len(turn) <= 40:
        ax.set_yticks(range(len(turn)), [str(int(unit)) for unit in turn], fontsize="small")
    return ax


def ordered(values: Tensor, order: Order | Sequence[int]) -> Tensor:
    """Return the indices of the units of `values (time, unit)` in the order asked for.

    `similar` sorts units by their angle in the plane of the two main directions in which they differ.

    >>> ordered(torch.tensor([[0.1, -3.0, 2.0]]), "size")
    tensor([1, 2, 0])
    """
    known = torch.nan_to_num(values)
    if isinstance(order, str):
        if order == "size":
            return known.abs().mean(0).argsort(descending=True, stable=True)
        if order == "peak":
            return known.abs().argmax(0).argsort(stable=True)
        if order == "similar":
            return _round_the_plane(known)
        raise BadInput(f"order is size, peak, similar or a list of unit numbers, but is {order!r}.")
    numbers = torch.as_tensor(list(order), dtype=torch.int64)
    units = values.shape[1]
    if len(numbers) and not 0 <= int(numbers.min()) <= int(numbers.max()) < units:
        raise BadInput(f"order names units {int(numbers.min())} to {int(numbers.max())}, but there are {units}.")
    return numbers


def _round_the_plane(values: Tensor) -> Tensor:
    moves = values - values.mean(0)
    moves = moves / moves.norm(dim=0).clamp(min=1e-12)  # compare the shapes of paths, not their sizes
    strength, plane = principal(picked(moves, 1024).values.double())
    if len(strength) < 2:
        return values.mean(0).argsort(stable=True)
    angle = torch.atan2(plane[1] * strength[1].sqrt(), plane[0] * strength[0].sqrt())
    return angle.argsort(stable=True)


def _values(shown: Tensor, ends: tuple[float, float] | None) -> dict[str, Any]:
    """Return a color scale around zero, or from 0 to 1 for gates."""
    if ends is not None:
        return {"cmap": DIVERGING if ends[0] < 0 < ends[1] else SEQUENTIAL, "vmin": ends[0], "vmax": ends[1]}
    finite = shown[shown.isfinite()]
    low, high = (float(finite.min()), float(finite.max())) if len(finite) else (0.0, 1.0)
    bound = max(abs(low), abs(high)) or 1.0
    one_sided = low >= 0 and bound <= 1  # a gate: zero is an end of its range, not the middle
    if one_sided:
        return {"cmap": SEQUENTIAL, "vmin": 0.0, "vmax": 1.0}
    return {"cmap": DIVERGING, "vmin": -bound, "vmax": bound}


def _sizes(shown: Tensor, ends: tuple[float, float] | None) -> dict[str, Any]:
    """Return a color scale in powers of ten; zero is below all of them."""
    from matplotlib.colors import LogNorm

    known = shown[shown.isfinite() & (shown != 0)].abs()
    low, high = ends or ((float(known.min()), float(known.max())) if len(known) else (0.1, 1.0))
    high = max(high, low * (1 + 1e-6))
    return {"cmap": SEQUENTIAL, "norm": LogNorm(low, high, clip=True)}


def _image(ax: Axes, shown: Tensor, scale: dict[str, Any], *, steps: int, units: int) -> object:
    from matplotlib import colormaps

    colors = colormaps[scale.pop("cmap")].with_extremes(bad="black")
    # Each pixel of the picture covers the units and steps that it stands for.
    rows, columns = max(1, shown.shape[0]), max(1, shown.shape[1])
    tall, wide = max(1, math.ceil(units / rows)), max(1, math.ceil(steps / columns))
    extent = (-0.5, columns * wide - 0.5, rows * tall - 0.5, -0.5)
    return ax.imshow(
        torch.where(shown.isfinite(), shown, torch.nan).numpy(),
        cmap=colors,
        **scale,
        aspect="auto",
        interpolation="nearest",
        extent=extent,
    )


def _title(track: str, part: str, row: str, values: Tensor) -> str:
    bad = int((~values.isfinite()).sum())
    said = f"{bad:,} of {values.numel():,} values are NaN or Inf (black)" if bad else ""
    said = said if bool(values.any()) else f"all {values.numel():,} values are 0"
    return " · ".join(text for text in (track, part if track else "", row, said) if text)


def _order(order: Order | Sequence[int]) -> str:
    known = {"size": "largest first", "peak": "earliest peak first", "similar": "similar ones side by side"}
    return known[order] if isinstance(order, str) else "as asked"
