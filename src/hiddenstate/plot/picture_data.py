"""The data of a picture: one row without padding, readable labels, and fewer units or steps if there are many.

Anything left out is reported: a `Thinned` has a note for the axis or the title.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..errors import BadInput
from ..recording import Trajectory, refuse_time_first

UNITS = 400  # with more units, each would be thinner than a pixel
STEPS = 800

# How characters that are invisible on an axis are written.
_INVISIBLE = {" ": "␣", "\n": "↵", "\t": "⇥", "\r": "←", "": "∅"}


def one_row(traj: Trajectory | Tensor | np.ndarray[Any, Any], *, part: str = "h", row: int = 0) -> Tensor:
    """Return one row of a part or gate, (time, unit), without its padding, detached and on the CPU.

    >>> walk = hs.Trajectory(torch.zeros(2, 5, 3), torch.tensor([5, 2]))
    >>> one_row(walk, row=1).shape
    torch.Size([2, 3])
    """
    if isinstance(traj, np.ndarray) and traj.dtype.kind in "fiu":
        traj = torch.tensor(traj)
    if isinstance(traj, Trajectory):
        values, lengths = traj.part(part), traj.lengths
    elif isinstance(traj, Tensor) and traj.dim() in (2, 3):
        refuse_time_first(traj)
        values, lengths = traj.unsqueeze(0) if traj.dim() == 2 else traj, None
    else:
        seen = f"a tensor of shape {tuple(traj.shape)}" if isinstance(traj, Tensor) else type(traj).__name__
        raise BadInput(
            f"drawn is a trajectory, or a tensor (batch, time, unit) or (time, unit), but this is {seen}. "
            f"A recording has one trajectory for each track: rec['lstm.l0']."
        )
    if not -len(values) <= row < len(values):
        raise BadInput(f"row {row} was asked for, but the trajectory has {len(values)} rows.")
    steps = values.shape[1] if lengths is None else int(lengths[row])
    # Copied, so that the picture stays the same if the tensor is changed later.
    return values[row, :steps].detach().to("cpu", torch.float32, copy=True)  # (time, unit)


def which_row(traj: Trajectory | Tensor | np.ndarray[Any, Any], row: int) -> str:
    """Return the name of a row for a title, or "" if it is the only one.

    >>> which_row(torch.zeros(3, 5, 2), 2), which_row(torch.zeros(5, 2), 0)
    ('row 2', '')
    """
    rows = len(traj.h) if isinstance(traj, Trajectory) else len(traj) if traj.ndim == 3 else 1
    return f"row {row % rows}" if rows > 1 else ""


def of_kind(result: object, name: str, source: str) -> None:
    """Raise unless `result` has the class with this name: another result may have the same fields."""
    from .. import measure

    if not isinstance(result, getattr(measure, name)):
        raise BadInput(
            f"drawn is a result of {source}, but this is {type(result).__name__}. Measure first, then draw: "
            f"hs.plot.{source.rpartition('.')[2]}(hs.{source}(...))."
        )


def bounds_of(limits: float | tuple[float, float] | None) -> tuple[float, float] | None:
    """Return the ends of a color scale as the user gave them; a single number means both sides of zero."""
    if limits is None:
        return None
    try:
        low, high = (-float(limits), float(limits)) if isinstance(limits, int | float) else map(float, limits)
    except (TypeError, ValueError):
        low = high = math.nan
    if not (math.isfinite(low) and math.isfinite(high) and low < high):
        raise BadInput(
            f"limits are one number above 0, or (low, high), the ends of the color scale, but are {limits!r}."
        )
    return low, high


def readable(tokens: Sequence[str], steps: int, *, what: str = "tokens", of: str = "step") -> list[str]:
    """Return one label for each step, with invisible characters replaced; raise if the number of labels is wrong.

    >>> readable(["a", " ", "b"], 3)
    ['a', '␣', 'b']
    """
    if len(tokens) != steps:
        raise BadInput(f"there are {len(tokens)} {what}, but {steps} {of}s: one for each {of} is needed.")
    return [_INVISIBLE.get(str(token), str(token).replace("\n", "↵").replace("\t", "⇥")) for token in tokens]


@dataclass(frozen=True, slots=True, eq=False)
class Thinned:
    """What is kept of a long axis, the first position of each kept entry, and a note about the rest."""

    values: Tensor
    index: Tensor  # (kept,) position of each kept entry, or of the first of its block
    note: str  # "" where everything is kept


def picked(values: Tensor, most: int, *, axis: int = 0, what: str = "units") -> Thinned:
    """Keep every nth entry along `axis`, so that at most `most` remain; values are not averaged.

    >>> picked(torch.arange(10), 4).note
    'every 3rd of 10 units'
    """
    count = values.shape[axis]
    every = max(1, -(-count // max(1, most)))
    index = torch.arange(0, count, every)
    note = "" if every == 1 else f"every {_ordinal(every)} of {count:,} {what}"
    return Thinned(values.index_select(axis, index.to(values.device)), index, note)


def averaged(values: Tensor, most: int, *, axis: int = 0, what: str = "steps") -> Thinned:
    """Replace blocks along `axis` by their means, so that at most `most` remain; a block with a NaN becomes NaN.

    >>> averaged(torch.arange(6.0), 3).values
    tensor([0.5000, 2.5000, 4.5000])
    """
    count = values.shape[axis]
    block = max(1, -(-count // max(1, most)))
    index = torch.arange(0, count, block)
    if block == 1:
        return Thinned(values, index, "")
    pieces = torch.split(values, block, dim=axis)
    means = torch.stack([piece.mean(axis) for piece in pieces], dim=axis)
    return Thinned(means, index, f"means of {block} of {count:,} {what}")


def jumps(paths: Sequence[Tensor]) -> bool:
    """Say whether paths (time, unit) jump around, so that lines between their steps would only be a tangle.

    >>> jumps([torch.linspace(0, 1, 100).unsqueeze(1)]), jumps([torch.randn(100, 1)])
    (False, True)
    """
    if max(map(len, paths)) <= 30:
        return False
    every = torch.cat(list(paths))
    spread = 2 * (every - every.mean(0)).square().sum(1).mean()
    moves = torch.cat([path.diff(dim=0).square().sum(1) for path in paths]).mean()
    return bool(moves > 0.25 * spread)  # moves are as large as the spread if steps do not depend on the last ones


def _ordinal(number: int) -> str:
    ending = {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th") if number % 100 not in (11, 12, 13) else "th"
    return f"{number}{ending}"
