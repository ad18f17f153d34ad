"""The opening of gates along time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from ..errors import BadInput
from ..recording import Recording, Trajectory, the_track
from .canvas import COLORS, STYLES, label_steps, new_ax, tidy
from .picture_data import STEPS, averaged, one_row, readable, which_row

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def gates(
    traj: Trajectory | Recording,
    ax: Axes | None = None,
    *,
    row: int = 0,
    tokens: Sequence[str] | None = None,
    names: Sequence[str] | None = None,
) -> Axes:
    """Draw how open each gate is along time: the median over units with their middle half; return the `ax`.

    Args:
        traj: A trajectory recorded with `gates=True`, or a recording of one track.
        ax: Where to draw; by default in a new figure.
        row: Which sequence of the batch.
        tokens: One label for each step of that row.
        names: Which gates to draw; by default all but the candidate, which is a value and not a gate.

    >>> walk = hs.Trajectory(torch.zeros(1, 9, 4), gates={"forget": torch.rand(1, 9, 4)})
    >>> hs.plot.gates(walk).get_ylabel()
    'opening: median, middle half of units'
    """
    walk: Trajectory = the_track(traj)
    chosen = _chosen(walk, names)
    bands = {name: one_row(walk, part=name, row=row) for name in chosen}  # name -> (time, unit)
    length = len(next(iter(bands.values())))
    labels = None if tokens is None else readable(tokens, length)

    ax = new_ax(ax)
    note = ""
    for number, (name, values) in enumerate(bands.items()):
        steps = averaged(values, STEPS)
        note = steps.note
        low, middle, high = steps.values.quantile(torch.tensor([0.25, 0.5, 0.75]), dim=1)
        at, color = steps.index.numpy() * walk.every, COLORS[number % len(COLORS)]
        ax.fill_between(at, low.numpy(), high.numpy(), color=color, alpha=0.15, linewidth=0)
        ax.plot(at, middle.numpy(), color=color, linestyle=STYLES[number % len(STYLES)], label=name)
    if all(bool(((values >= 0) & (values <= 1) | values.isnan()).all()) for values in bands.values()):
        ax.set_ylim(-0.02, 1.02)
    title = " · ".join(text for text in (walk.track, which_row(walk, row)) if text)
    tidy(ax, title=title, x=f"step ({note})" if note else "step", y="opening: median, middle half of units")
    ax.legend(frameon=False, ncols=len(bands), loc="lower left", bbox_to_anchor=(0.0, 1.08 if title else 1.0))
    if labels:
        label_steps(lambda at, text, **how: ax.set_xticks([place * walk.every for place in at], text, **how), labels)
    return ax


def _chosen(traj: Trajectory, names: Sequence[str] | None) -> list[str]:
    if not isinstance(traj, Trajectory):
        raise BadInput(f"gates are drawn from a trajectory, but this is {type(traj).__name__}: rec['lstm.l0'].")
    if not traj.gates:
        raise BadInput("this trajectory has no gates: record it with hs.record(model, gates=True).")
    chosen = [name for name in traj.gates if name != "candidate"] if names is None else list(names)
    if unknown := [name for name in chosen if name not in traj.gates]:
        raise BadInput(f"there is no gate named {unknown[0]!r} in this trajectory, only {', '.join(traj.gates)}.")
    return chosen or list(traj.gates)
