"""What a measure of states works on: values (batch, time, unit) and which of them are real."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..errors import BadInput
from ..recording import Trajectory


@dataclass(frozen=True, slots=True, eq=False)
class Series:
    """One quantity along time; what padding holds never counts."""

    values: Tensor  # (batch, time, unit), floating, detached, zero in the padding
    valid: Tensor  # (batch, time) bool
    name: str

    @property
    def entries(self) -> Tensor:
        """All real steps of all rows, one below the other: (entry, unit)."""
        return self.values[self.valid]

    @property
    def lengths(self) -> Tensor:
        """The real steps of each row: (batch,)."""
        return self.valid.sum(1)

    @property
    def final(self) -> Tensor:
        """The last real step of each row: (batch, unit)."""
        rows = torch.arange(len(self.values), device=self.values.device)
        return self.values[rows, self.lengths - 1]


def as_series(traj: Trajectory | Tensor, lengths: Tensor | None = None, *, part: str = "h") -> Series:
    """Return one part of a trajectory, or a tensor with its lengths, checked."""
    if isinstance(traj, Trajectory):
        if lengths is not None:
            raise BadInput("a Trajectory knows its own lengths: lengths= is for plain tensors.")
        return _series(traj.part(part), traj.valid, part)
    if not isinstance(traj, Tensor):
        raise BadInput(
            f"states are a Trajectory or a tensor (batch, time, unit), but this is {type(traj).__name__}. "
            f"A recording holds one trajectory for each track: give one of them, recording['l0']."
        )
    if traj.dim() != 3:
        raise BadInput(
            f"states are (batch, time, unit), but this tensor has shape {tuple(traj.shape)}. "
            f"One sequence without a batch axis becomes one with h.unsqueeze(0)."
        )
    return _series(traj, valid_steps(traj, lengths), "the tensor")


def valid_steps(x: Tensor, lengths: Tensor | None) -> Tensor:
    """Return which steps of `x (batch, time, ...)` are real: bool (batch, time)."""
    batch, time = x.shape[:2]
    if lengths is None:
        return torch.ones(batch, time, dtype=torch.bool, device=x.device)
    lengths = torch.as_tensor(lengths, device=x.device)
    if lengths.shape != (batch,):
        raise BadInput(f"lengths have shape {tuple(lengths.shape)}, but there are {batch} rows: one length for each.")
    if lengths.is_floating_point() or lengths.dtype == torch.bool:
        raise BadInput(f"lengths are {lengths.dtype}, but whole numbers of steps are needed: mask.sum(1) of a mask.")
    if batch and not 0 <= int(lengths.min()) <= int(lengths.max()) <= time:
        raise BadInput(f"lengths go from {int(lengths.min())} to {int(lengths.max())}, but there are {time} steps.")
    return torch.arange(time, device=x.device) < lengths.unsqueeze(1)


def refuse_bad(series: Series) -> Series:
    """Return the series where all real values are finite, else say where the first NaN or Inf is."""
    where = first_bad(series.values, series.valid)
    if where is not None:
        row, step, unit = where
        raise BadInput(
            f"{series.name} has {series.values[row, step, unit].item()} at step {step} of row {row} (unit {unit}), the "
            f"first of {int((~series.entries.isfinite()).sum())} values that are not finite: from there on nothing can "
            f"be measured. hs.measure.statistics counts them; the cause is upstream, in the input, the weights or a "
            f"loss that overflowed."
        )
    return series


def first_bad(values: Tensor, valid: Tensor) -> tuple[int, int, int] | None:
    """Return (row, step, unit) of the earliest real value that is not finite; None where all are."""
    bad = ~values.isfinite() & valid.unsqueeze(-1)
    if not bool(bad.any()):
        return None
    step, row, unit = bad.transpose(0, 1).nonzero()[0].tolist()
    return row, step, unit


def _series(values: Tensor, valid: Tensor, name: str) -> Series:
    if values.dim() != 3:
        values = values.flatten(2)  # a part with more axes, such as a matrix memory, is units all the same
    if not bool(valid.any()):
        rows, steps = valid.shape
        raise BadInput(
            f"there is nothing to measure: {rows} rows of {steps} steps, none of them real. "
            f"Often a batch was filtered until nothing was left, or all lengths are 0."
        )
    values = values.detach()
    if values.is_complex():
        values = torch.view_as_real(values).flatten(2)
    if not values.is_floating_point():
        raise BadInput(f"{name} is {values.dtype}, but states are floating point numbers.")
    if values.dtype in (torch.float16, torch.bfloat16):
        values = values.float()  # sums over many steps would lose their digits
    if not bool(valid.all()):
        values = values.masked_fill(~valid.unsqueeze(-1), 0)
    return Series(values, valid, name)
