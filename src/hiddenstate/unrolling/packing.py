"""Cutting rows into segments and packing these: the place of each step of each row."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .checks import Task


@dataclass(frozen=True, slots=True, eq=False)
class Packing:
    """Segments sorted by length, longest first, and their steps in the order of a PackedSequence.

    A segment is a piece of a row that runs from one start to the next, or to the end of the row.
    """

    index: Tensor  # (valid steps,) place of each packed step in x flattened to (batch * time, ...)
    batch_sizes: Tensor  # (longest segment,) how many segments have that many steps or more
    rows: Tensor  # (segments,) the row that each segment is cut from
    starts: Tensor  # (segments,) the step of that row which it begins with
    continues: Tensor  # (segments,) bool: goes on from the given state, rather than from the initial one
    last: Tensor  # (batch,) the segment that each row ends in

    @property
    def segments(self) -> int:
        """How many segments there are."""
        return len(self.rows)

    def pack(self, x: Tensor) -> Tensor:
        """Return the valid steps of x (batch, time, ...) in packed order."""
        return x.flatten(0, 1).index_select(0, self.index.to(x.device))

    def unpack(self, packed: Tensor, batch: int, steps: int) -> Tensor:
        """Return packed steps at their places (batch, time, ...), with zeros elsewhere."""
        flat = packed.new_zeros(batch * steps, *packed.shape[1:])
        return flat.index_copy(0, self.index.to(packed.device), packed).view(batch, steps, *packed.shape[1:])


def plan(task: Task) -> Packing:
    """Cut the rows of a task at their resets and ends, in time linear in its steps."""
    batch, steps = task.x.shape[:2]
    valid = torch.ones(batch, steps, dtype=torch.bool, device="cpu")
    if task.lengths is not None:
        valid = torch.arange(steps, device="cpu") < task.lengths[:, None]
    starts = torch.zeros_like(valid) if task.resets is None else task.resets & valid
    anew = starts[:, 0].clone()
    starts[:, 0] = True
    places = valid.flatten().nonzero().squeeze(1)  # (valid steps,) in the order of rows
    first = starts.flatten().nonzero().squeeze(1)  # (segments,)
    segment = starts.flatten().cumsum(0)[places] - 1
    offset = places - first[segment]  # steps since the segment's start
    order = torch.bincount(segment).argsort(descending=True, stable=True)
    rank = torch.empty_like(order)
    rank[order] = torch.arange(len(order), device="cpu")
    batch_sizes = torch.bincount(offset)
    # At each offset the segments that are that long are the first ones in rank: its place needs no sorting.
    packed = (batch_sizes.cumsum(0) - batch_sizes)[offset] + rank[segment]
    index = torch.empty_like(places)
    index[packed] = places
    rows, starts_at = (first // steps)[order], (first % steps)[order]
    continues = ((first % steps == 0) & ~anew[first // steps])[order]
    return Packing(index, batch_sizes, rows, starts_at, continues, rank[starts.sum(1).cumsum(0) - 1])
