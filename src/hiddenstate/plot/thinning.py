"""Drawing thousands of units or steps honestly: fewer of them, and a note that says which."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

UNITS = 400  # beyond this many a unit is thinner than a pixel
STEPS = 800


@dataclass(frozen=True, slots=True, eq=False)
class Thinned:
    """What is left of a long axis, where each kept entry began, and what has to be said about it."""

    values: Tensor
    index: Tensor  # (kept,) position of each kept entry, or of the first of its block
    note: str  # "" where everything is kept


def picked(values: Tensor, most: int, *, axis: int = 0, what: str = "units") -> Thinned:
    """Keep every nth entry along `axis`, so that at most `most` remain: true values, none invented.

    >>> picked(torch.arange(10), 4).note
    'every 3rd of 10 units'
    """
    count = values.shape[axis]
    every = max(1, -(-count // max(1, most)))
    index = torch.arange(0, count, every)
    note = "" if every == 1 else f"every {_ordinal(every)} of {count:,} {what}"
    return Thinned(values.index_select(axis, index.to(values.device)), index, note)


def averaged(values: Tensor, most: int, *, axis: int = 0, what: str = "steps") -> Thinned:
    """Replace blocks along `axis` by their means, so that at most `most` remain; a NaN in a block shows.

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


def _ordinal(number: int) -> str:
    ending = {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th") if number % 100 not in (11, 12, 13) else "th"
    return f"{number}{ending}"
