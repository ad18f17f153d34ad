"""Reading `rows` arguments, which say which sequences of a batch are meant: indices, a bool mask, or a slice."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from .._compiling import compiling
from ..errors import StateMismatch

Rows: TypeAlias = "int | slice | Sequence[int] | Sequence[bool] | Tensor | np.ndarray[Any, Any]"


def row_index(rows: Rows, batch: int, device: torch.device, *, unique: bool = False) -> Tensor:
    """Return `rows` as int64 indices on `device`, checked against a batch of `batch` rows.

    With `unique=True`, for writing, a row may be named only once. An integer tensor of only zeros and ones that is as
    long as the batch is refused too: it was meant as a mask.

    >>> row_index([True, False, True], 3, torch.device("cpu"))
    tensor([0, 2])
    """
    if isinstance(rows, slice):
        named = range(*rows.indices(batch))
        if len(named) == 0:  # torch.arange refuses a start beyond the stop
            return torch.empty(0, dtype=torch.int64, device=device)
        return torch.arange(named.start, named.stop, named.step, device=device)
    if isinstance(rows, Tensor | np.ndarray) and rows.ndim:
        given = rows if isinstance(rows, Tensor) else _from_numpy(rows)
        return _from_tensor(given, batch, unique=unique).to(device)
    numbers = _from_numbers(rows, batch)
    if unique:
        _refuse_twice(numbers)
    return torch.tensor(numbers, dtype=torch.int64, device=device)


def _from_numbers(rows: Any, batch: int) -> list[int]:
    # Checked in plain Python, not in torch, so that torch.compile can trace it.
    many = isinstance(rows, Sequence) and not isinstance(rows, str | bytes)
    numbers = [_number(row) for row in (rows if many else [rows])]
    if not many and isinstance(numbers[0], bool):
        raise _unreadable(rows)
    if numbers and all(isinstance(number, bool) for number in numbers):
        _check_mask_length(len(numbers), batch)
        return [row for row, chosen in enumerate(numbers) if chosen]
    for number in numbers:
        if isinstance(number, bool):
            raise StateMismatch(
                "rows mix True or False with numbers. Give indices, or a mask of one True or False for each row."
            )
        if not -batch <= number < batch:
            raise _outside(number, batch)
    return [number + batch if number < 0 else number for number in numbers]


def _number(row: Any) -> int:
    if isinstance(row, Tensor | np.ndarray | np.generic) and row.ndim == 0:
        row = row.item()
    if not isinstance(row, int):
        raise _unreadable(row)
    return row


def _from_numpy(rows: np.ndarray[Any, Any]) -> Tensor:
    if rows.dtype.kind not in "biuf":
        raise _unreadable(rows)
    # Copied, in a dtype that torch has: arrays may be read-only, reversed, or in another byte order.
    return torch.from_numpy(rows.astype({"b": np.bool_, "f": np.float64}.get(rows.dtype.kind, np.int64)))


def _from_tensor(given: Tensor, batch: int, *, unique: bool) -> Tensor:
    if given.dim() != 1:
        raise StateMismatch(
            f"rows have shape {tuple(given.shape)}, but one axis is needed: "
            f"indices, or a bool mask of {batch} entries. A mask of shape (batch, 1) wants mask[:, 0]."
        )
    if given.dtype == torch.bool:
        _check_mask_length(len(given), batch)
        return given.nonzero(as_tuple=True)[0]
    if given.numel() == 0:
        return given.to(torch.int64)
    if given.dtype.is_floating_point or given.dtype.is_complex:
        raise StateMismatch(
            f"rows are {given.dtype}, but indices (int64) or a mask (bool) are needed. "
            f"A mask kept as numbers becomes one with mask.bool()."
        )
    given = given.to(torch.int64)
    if unique or not compiling():  # in a compiled graph, index_select's own range check must do
        _check_indices(given.cpu(), batch, unique=unique)  # one copy to the CPU: a GPU is waited for only once
    return torch.where(given < 0, given + batch, given)


def _check_indices(given: Tensor, batch: int, *, unique: bool) -> None:
    # A list of numbers can only mean indices; a tensor of zeros and ones may come from `done.long()` or `1 - done`.
    if unique and len(given) == batch and bool(((given == 0) | (given == 1)).all()):
        raise StateMismatch(
            f"rows are {batch} integers, all 0 or 1, as many as the state has rows: a mask was meant, "
            f"but as indices they name rows 0 and 1 only. Use rows.bool() for a mask, or a list for indices."
        )
    outside = (given < -batch) | (given >= batch)
    if bool(outside.any()):
        raise _outside(int(given[outside][0]), batch)
    if unique:
        _refuse_twice((given % batch).tolist())


def _check_mask_length(length: int, batch: int) -> None:
    if length != batch:
        raise StateMismatch(
            f"the mask has {length} entries, but the state has {batch} rows. "
            f"A mask says True or False for each row; to name rows by number, give integers."
        )


def _refuse_twice(numbers: list[int]) -> None:
    if len(set(numbers)) == len(numbers):
        return
    seen: set[int] = set()
    for row in numbers:
        if row in seen:
            raise StateMismatch(
                f"row {row} is named more than once, so it is unclear which value it should get. Name each row once."
            )
        seen.add(row)


def _outside(row: int, batch: int) -> StateMismatch:
    rows = f"{batch} rows, 0 to {batch - 1}" if batch > 1 else "one row, 0" if batch else "no rows"
    return StateMismatch(
        f"row {row} is asked for, but the state has {rows}. "
        f"Often the rows were counted in another batch, or the last batch of an epoch is smaller."
    )


def _unreadable(rows: object) -> StateMismatch:
    return StateMismatch(
        f"rows cannot be read from {rows!r} ({type(rows).__name__}): give an index, a slice, a list or tensor of "
        f"indices, or a bool mask with one entry for each row."
    )
