"""Where the rows of a batch are, read from calls with other rows."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .flat import leaves, replaced


def batch_of(inputs: Any, axis: int) -> int | None:
    """Return how many rows a call has, if its rows lie along `axis`."""
    sizes = [tensor.shape[axis] for _, tensor in leaves(inputs) if tensor.dim() > max(axis, 1)]
    sizes = sizes or [tensor.shape[axis] for _, tensor in leaves(inputs) if tensor.dim() > axis]
    return sizes[0] if sizes else None


def other_size(inputs: Any, axis: int) -> tuple[Any, int, int] | None:
    """Return the inputs with another number of rows along `axis`, and both numbers."""
    rows = batch_of(inputs, axis)
    if rows is None or rows == 0:
        return None
    fewer = rows > 2

    def changed(tensor: Tensor) -> Tensor:
        if tensor.layout is not torch.strided or tensor.dim() <= axis or tensor.shape[axis] != rows:
            return tensor
        if fewer:
            return tensor.narrow(axis, 0, rows - 1)
        return torch.cat([tensor, tensor.narrow(axis, 0, 1)], dim=axis)

    return replaced(inputs, changed), rows, rows - 1 if fewer else rows + 1


def other_row(inputs: Any, axis: int, row: int = 0) -> Any | None:
    """Return the inputs with something else in one row."""
    rows = batch_of(inputs, axis)
    if rows is None or rows < 2:
        return None

    def changed(tensor: Tensor) -> Tensor:
        if tensor.layout is not torch.strided or tensor.dim() <= max(axis, 1) or tensor.shape[axis] != rows:
            return tensor
        new = tensor.detach().clone()
        first, second = new.select(axis, row), new.select(axis, (row + 1) % rows)
        if tensor.is_floating_point() or tensor.is_complex():
            first.copy_(0.6 * second + 0.3 * first.flip(0) + 0.05)
        elif tensor.dtype is not torch.bool:
            first.copy_(second if not torch.equal(first, second) else first.flip(-1))
        return new

    return replaced(inputs, changed)


def axis_by_size(one: tuple[int, ...], other: tuple[int, ...], sizes: tuple[int, int]) -> int | None:
    """Return the axis that followed the number of rows."""
    if len(one) != len(other):
        return None
    moved = [axis for axis, pair in enumerate(zip(one, other, strict=True)) if pair[0] != pair[1]]
    return moved[0] if len(moved) == 1 and (one[moved[0]], other[moved[0]]) == sizes else None


def axis_by_row(pairs: list[tuple[Tensor, Tensor]], rows: int, row: int = 0) -> int | None:
    """Return the axis along which only one entry changed, in tensors before and after something else in that row."""
    if not pairs or any(each.shape != pairs[0][0].shape for pair in pairs for each in pair):
        return None
    changed = torch.zeros(pairs[0][0].shape, dtype=torch.bool)
    for one, other in pairs:
        changed |= (one != other).cpu()
    if not bool(changed.any()):
        return None
    fits = []
    for axis, size in enumerate(changed.shape):
        others = [index for index in range(size) if index != row]
        if size == rows and not bool(changed.index_select(axis, torch.tensor(others, dtype=torch.long)).any()):
            fits.append(axis)
    return fits[0] if len(fits) == 1 else None
