"""The score of a readout along time: what each step knows."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING

import torch

from ..errors import BadInput
from .canvas import COLORS, MUTED, STYLES, label_steps, new_ax, plain, tidy
from .picture_data import of_kind, readable

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from ..measure import Probe


def probe(
    result: Probe | Mapping[str, Probe], ax: Axes | None = None, *, tokens: Sequence[str] | None = None, label: str = ""
) -> Axes:
    """Draw how well a target can be read from the state at each step, with chance and shuffled targets.

    The probes of a recording get one line for each track. To compare several, draw them into one `ax`, each with a
    `label`.

    Args:
        result: What `measure.probe` returned, of a trajectory or of a recording.
        ax: Where to draw; by default in a new figure.
        tokens: One label for each step.
        label: The name of this line, if there are several.

    >>> states = torch.randn(40, 9, 4).cumsum(1)
    >>> hs.plot.probe(hs.measure.probe(states, states[:, 4, 0] > 0)).get_ylabel()
    'accuracy on unseen rows'
    """
    several = dict(result) if isinstance(result, Mapping) else {label: result}
    if not several:
        raise BadInput("there is no probe to draw: the mapping is empty.")
    for one in several.values():
        of_kind(one, "Probe", "measure.probe")
    first = next(iter(several.values()))
    if len({bool(one.classes) for one in several.values()}) > 1:
        raise BadInput("some of these probes have an accuracy and others an R²: they cannot share one picture.")
    steps = max(len(one.accuracy) for one in several.values())
    names = None if tokens is None else readable(tokens, steps)

    ax = new_ax(ax)
    drawn = [line for line in ax.lines if line.get_gid() == "score"]
    for number, (name, one) in enumerate(several.items(), len(drawn)):
        _line(ax, one, name, number)
    if not drawn:
        ax.axhline(first.chance, color=MUTED, linestyle=":", linewidth=1.2, label="chance" if first.classes else "mean")
    score = "accuracy" if first.classes else "R²"
    low = min(float(one.accuracy.nan_to_num(0).min()) for one in several.values())
    ax.set_ylim(0 if first.classes else max(-1.0, min(low, -0.05)), 1.02)
    tidy(ax, x="step", y=f"{score} on unseen rows", title=_said(several.values()))
    lines, labels = ax.get_legend_handles_labels()
    last = sorted(range(len(labels)), key=lambda at: lines[at].get_gid() != "score")  # baselines after the scores
    ax.legend([lines[at] for at in last], [labels[at] for at in last], frameon=False, fontsize="small")
    if names:
        label_steps(ax.set_xticks, names)
    return ax


def _said(probes: Collection[Probe]) -> str:
    """Return what the lines do not show: that the probe was interrupted, or lacks rows at some steps."""
    if any(one.interrupted for one in probes):
        return "interrupted: later steps are missing"
    without, steps = max((int(one.accuracy.isnan().sum()), len(one.accuracy)) for one in probes)
    return f"too few rows for a score at {without} of {steps} steps" if without else ""


def _line(ax: Axes, one: Probe, name: str, number: int) -> None:
    steps = torch.arange(len(one.accuracy)).numpy()
    color, style = COLORS[number % len(COLORS)], STYLES[number % len(STYLES)]
    mark = "o" if len(steps) <= 40 else ""
    score = one.accuracy.cpu().numpy()
    label = plain(name) if name else "accuracy" if one.classes else "R²"
    ax.plot(steps, score, color=color, linestyle=style, marker=mark, markersize=3.5, label=label, gid="score")
    ax.plot(steps, one.shuffled.cpu().numpy(), color=color if name else MUTED, linewidth=0.8, alpha=0.6, linestyle="-",
            label="shuffled targets" if number == 0 else None)  # fmt: skip
