"""Dead units: units that stay at zero or never move."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..state import shown_in_short
from .series import ManyStates, pieces, refuse_bad


@shown_in_short
@dataclass(frozen=True, slots=True, eq=False)
class DeadUnits:
    """The units that stay at zero, and those that stay at another value."""

    units: Tensor  # (dead,) indices of the units whose size never exceeds the threshold
    share: float
    constant: Tensor  # (stuck,) indices of other units that never move by more than the threshold
    total: int
    threshold: float

    def __str__(self) -> str:
        """Return one line."""
        named = ", ".join(str(unit) for unit in self.units[:10].tolist()) + (", …" if len(self.units) > 10 else "")
        dead = f"{len(self.units)} of {self.total} units are dead (|h| ≤ {self.threshold:g} at every step)"
        stuck = f"; {len(self.constant)} more never move" if len(self.constant) else ""
        return f"{dead}{': ' + named if named else ''}{stuck}"


def dead_units(
    traj: ManyStates, threshold: float = 1e-5, *, lengths: Tensor | None = None, part: str = "h"
) -> DeadUnits:
    """Return the units whose size never exceeds `threshold` at any real step of any row, in one run or in many.

    A unit that is stuck at another value is in `constant`, not in `units`.

    >>> states = torch.rand(3, 5, 4).index_fill(2, torch.tensor([1]), 0.0)
    >>> print(dead_units(states))
    1 of 4 units are dead (|h| ≤ 1e-05 at every step): 1
    """
    low = high = None
    count = 0
    for series in pieces(traj, lengths, part=part):
        entries = refuse_bad(series).entries  # (entry, unit)
        lowest, highest = entries.amin(0), entries.amax(0)
        low = lowest if low is None else torch.minimum(low, lowest)
        high = highest if high is None else torch.maximum(high, highest)
        count += len(entries)
    assert low is not None
    assert high is not None
    silent = torch.maximum(-low, high) <= threshold
    still = (high - low <= threshold) & (count > 1)  # with a single step, nothing can move
    units = silent.nonzero().flatten()
    total = len(low)
    return DeadUnits(
        units=units,
        share=len(units) / total if total else 0.0,
        constant=(still & ~silent).nonzero().flatten(),
        total=total,
        threshold=threshold,
    )
