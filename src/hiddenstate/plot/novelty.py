"""Novelty scores along time, with the threshold."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from ..errors import BadInput
from .canvas import COLORS, MUTED, new_ax, tidy
from .picture_data import of_kind

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from ..measure import Novelty


def novelty(result: Novelty, ax: Axes | None = None, *, row: int = 0, truth: Any = None, log: bool = False) -> Axes:
    """Draw the score of each step of one row, the threshold, and the steps above it, and return the `ax`.

    Args:
        result: What `measure.novelty` returned.
        ax: Where to draw; by default in a new figure.
        row: Which sequence of the batch.
        truth: Steps known to be strange, which are shaded: bool (time,) or (batch, time).
        log: Draw a log scale, for single steps that are far stranger than all others.

    >>> found = hs.measure.novelty(torch.randn(1, 40, 3), torch.randn(4, 40, 3))
    >>> hs.plot.novelty(found).get_ylabel()
    'distance from seen states'
    """
    of_kind(result, "Novelty", "measure.novelty")
    if not -len(result.scores) <= row < len(result.scores):
        raise BadInput(f"row {row} was asked for, but there are {len(result.scores)} rows.")
    scores = result.scores[row].detach().cpu()
    known = None if truth is None else _truth(truth, result, row)
    steps, flagged = torch.arange(len(scores)), result.flagged[row].cpu()

    ax = new_ax(ax, size=(8.0, 3.4))
    if known is not None:
        edges = torch.cat([torch.zeros(1), known.double(), torch.zeros(1)]).diff()
        for number, (begin, end) in enumerate(zip((edges > 0).nonzero(), (edges < 0).nonzero(), strict=True)):
            label = "known to be strange" if number == 0 else None
            ax.axvspan(int(begin) - 0.5, int(end) - 0.5, color=COLORS[5], alpha=0.3, linewidth=0, label=label)
    ax.plot(steps.numpy(), scores.numpy(), color=COLORS[0], linewidth=1.0)
    ax.plot(
        steps[flagged].numpy(),
        scores[flagged].numpy(),
        color=COLORS[1],
        marker="o",
        markersize=3,
        linestyle="",
        label=f"{int(flagged.sum())} flagged",
    )
    name = f"{result.quantile:.3g} of seen states lie below"
    ax.axhline(result.threshold, color=MUTED, linestyle="--", linewidth=1.0, label=name)
    if log:
        ax.set_yscale("log")
    else:
        ax.set_ylim(bottom=0)
    how = (
        "Mahalanobis, in deviations of the seen states" if result.method == "mahalanobis" else "to the nearest of them"
    )
    tidy(ax, x="step", y="distance from seen states", title=how)
    ax.legend(frameon=False, fontsize="small")
    return ax


def _truth(truth: Any, result: Novelty, row: int) -> torch.Tensor:
    known = torch.as_tensor(truth).cpu().bool()
    if known.shape not in (result.scores.shape, result.scores.shape[1:]):
        raise BadInput(
            f"truth has shape {tuple(known.shape)}, but {tuple(result.scores.shape)} is needed, or one row of it, "
            f"{tuple(result.scores.shape[1:])}."
        )
    return known[row] if known.dim() == 2 else known
