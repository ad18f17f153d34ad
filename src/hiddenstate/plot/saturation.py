"""The saturation of each unit, or of each step."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import torch

from ..errors import BadInput
from .canvas import COLORS, new_ax, tidy
from .picture_data import of_kind

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from ..measure import Saturation

_BARS = 64  # with more units, they are sorted instead of drawn at their own place


def saturation(result: Saturation, ax: Axes | None = None, *, by: Literal["unit", "step"] = "unit") -> Axes:
    """Draw the saturated share of each unit or step, with the overall share as a line, and return the `ax`.

    More than 64 units are sorted by saturation, so that the picture shows how many are saturated.

    Args:
        result: What `measure.saturation` returned.
        ax: Where to draw; by default in a new figure.
        by: Each `unit` or each `step`.

    >>> hs.plot.saturation(hs.measure.saturation(torch.randn(2, 30, 8).tanh())).get_xlabel()
    'unit'
    """
    if by not in ("unit", "step"):
        raise BadInput(f"by is 'unit' or 'step', but is {by!r}.")
    of_kind(result, "Saturation", "measure.saturation")
    shares = (result.units if by == "unit" else result.steps).detach().double().cpu()
    ax = new_ax(ax)
    places = torch.arange(len(shares)).numpy()
    label: str = by
    if by == "unit" and len(shares) <= _BARS:
        ax.bar(places, shares.numpy(), color=COLORS[0], width=0.8)
    else:
        if by == "unit":
            shares = shares.sort(descending=True).values
            label = f"{len(shares):,} units, most saturated first"
        ax.fill_between(places, shares.nan_to_num().numpy(), color=COLORS[0], alpha=0.35, step="mid", linewidth=0)
        ax.step(places, shares.numpy(), color=COLORS[0], where="mid")
    if result.share > 0:
        ax.axhline(result.share, color=COLORS[1], linestyle="--", linewidth=1)
    ax.set_ylim(0, 1.02)
    ax.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    beyond = f" (beyond {result.threshold:g} of the range)"
    share = (
        f"{result.share:.1%} saturated over all (dashed)"
        if float(shares.nan_to_num().max()) > 0
        else "nothing is saturated"
    )
    tidy(ax, x=label, y=f"saturated {'steps' if by == 'unit' else 'units'}{beyond}", title=share)
    return ax
