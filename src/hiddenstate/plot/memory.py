"""How far back an input still affects the output, on a log scale."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from .canvas import COLORS, MUTED, new_ax, tidy
from .picture_data import of_kind

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from ..measure import Memory


def memory(result: Memory, ax: Axes | None = None, *, label: str = "") -> Axes:
    """Draw the influence of an input over its distance, with threshold and effective length; return the `ax`.

    The curve is the mean over rows, and the band holds the middle 80 % of them. If a few rows make up most of the mean,
    the curve lies above the band, and the picture says so.
    To compare several models, draw them into one `ax`, each with a `label`.

    Args:
        result: What `measure.memory` returned.
        ax: Where to draw; by default in a new figure.
        label: The name of this curve, if there are several.

    >>> found = hs.measure.memory(torch.nn.GRU(3, 8, batch_first=True), torch.randn(4, 30, 3))
    >>> hs.plot.memory(found).get_yscale()
    'log'
    """
    of_kind(result, "Memory", "measure.memory")
    curve, low, high = (values.detach().double().cpu() for values in (result.curve, *result.spread()))
    peak = float(curve.nan_to_num().max()) if len(curve) else 0.0
    felt = peak > 0

    first = ax is None or not ax.lines
    ax = new_ax(ax)
    color = COLORS[len([line for line in ax.lines if line.get_gid() == "curve"]) % len(COLORS)]
    lags = torch.arange(len(curve)).numpy()
    # A log scale has no zero: a curve that reaches zero ends below the picture.
    floor = float(curve[curve > 0].min()) / 10 if felt else 0.0
    low, high = low.clamp(min=floor), high.clamp(min=floor)
    ax.fill_between(lags, low.numpy(), high.numpy(), color=color, alpha=0.15, linewidth=0)
    marker = "o" if len(curve) <= 40 else ""
    ax.plot(lags, curve.clamp(min=floor).numpy(), color=color, label=label, gid="curve", marker=marker, markersize=3)
    if felt:
        ax.set_yscale("log")
        _marks(ax, result, peak=peak, color=color, write=first)
    if felt and bool(((curve > high) & (curve > floor)).any()):
        ax.annotate(
            "above the band a few rows make up the mean",
            (0.02, 0.02),
            xycoords="axes fraction",
            color=MUTED,
            fontsize="small",
        )
    tidy(ax, x="lag: steps before the output", y="influence ‖d output / d input‖", title=_title(result, felt, label))
    if label:
        ax.legend(frameon=False)
    return ax


def _marks(ax: Axes, result: Memory, *, peak: float, color: str, write: bool) -> None:
    level = result.threshold * peak
    ax.axhline(level, color=color, linestyle=":", linewidth=1)
    ax.axvline(result.length - 1, color=color, linestyle="--", linewidth=1)
    if write:
        ax.annotate(f"{result.threshold:.3g} of the peak", (1.0, level), xycoords=("axes fraction", "data"),
                    xytext=(-2, 3), textcoords="offset points", ha="right", color=MUTED, fontsize="small")  # fmt: skip


def _title(result: Memory, felt: bool, label: str) -> str:
    if not felt:
        return "the input does not move the output at all"
    if label:
        return ""
    at_least = "at least " if result.cut_off else ""
    half = f", half-life {result.half_life:.3g}" if math.isfinite(result.half_life) else ""
    return f"effective length: {at_least}{result.length} steps{half}"
