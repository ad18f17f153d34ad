"""Which rows of a batch are meant: indices, a bool mask, or a slice."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from ..errors import StateMismatch

Rows: TypeAlias = "int | slice | Sequence[int] | Sequence[bool] | Tensor | np.ndarray[Any, Any]"


def row_index(rows: Rows, batch: int, device: torch.device, *, unique: bool = False) -> Tensor:
    """Return `rows` as int64 indices on `device`, checked against a batch of `batch` rows.

    With `unique=True` (for writing) a row may be named once only, and an integer tensor of zeros
    and ones as long as the batch is refused: it was meant as a mask.
    """
    if isinstance(rows, slice):
        return torch.arange(*rows.indices(batch), device=device)
    if isinstance(rows, int) and not isinstance(rows, bool):
        rows = [rows]
    given = torch.as_tensor(rows)
    if given.numel() == 0 and given.dtype != torch.bool:
        return torch.empty(0, dtype=torch.int64, device=device)
    if given.dim() != 1:
        raise StateMismatch(
            f"rows have shape {tuple(given.shape)}, but one axis is needed: indices, or a bool mask of {batch} entries. "
            f"A mask of shape (batch, 1) wants mask[:, 0]."
        )
    if given.dtype == torch.bool:
        return _from_mask(given, batch, device)
    if given.dtype.is_floating_point or given.dtype.is_complex:
        raise StateMismatch(
            f"rows are {given.dtype}, but indices (int64) or a mask (bool) are needed. "
            f"A mask kept as numbers becomes one with mask.bool()."
        )
    given = given.to(torch.int64)
    if unique:
        _refuse_integer_mask(rows, given, batch)
    return _in_range(given, batch, unique=unique).to(device)


def _from_mask(mask: Tensor, batch: int, device: torch.device) -> Tensor:
    if len(mask) != batch:
        raise StateMismatch(
            f"the mask has {len(mask)} entries, but the state has {batch} rows. "
            f"A mask says True or False for each row; to name rows by number, give integers."
        )
    return mask.nonzero(as_tuple=True)[0].to(device)


def _refuse_integer_mask(rows: Rows, given: Tensor, batch: int) -> None:
    # A list of numbers can only be read as indices; a tensor may come from `done.long()` or `1 - done`.
    if isinstance(rows, Tensor | np.ndarray) and len(given) == batch and bool(((given == 0) | (given == 1)).all()):
        raise StateMismatch(
            f"rows are {batch} integers, all 0 or 1, as many as the state has rows: a mask was meant, "
            f"but as indices they name rows 0 and 1 only. Use rows.bool() for a mask, or a list for indices."
        )


def _in_range(index: Tensor, batch: int, *, unique: bool) -> Tensor:
    outside = (index < -batch) | (index >= batch)
    if bool(outside.any()):
        raise StateMismatch(
            f"row {int(index[outside][0])} is asked for, but the state has {batch} rows, 0 to {batch - 1}."
        )
    index = torch.where(index < 0, index + batch, index)
    if unique and len(index.unique()) != len(index):
        twice = next(row for row in index.tolist() if index.tolist().count(row) > 1)
        raise StateMismatch(
            f"row {twice} is named more than once, so it is unclear which value it should get. Name each row once."
        )
    return index
