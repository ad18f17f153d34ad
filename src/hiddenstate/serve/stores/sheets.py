"""Rows of bytes that are written by the hundred and replaced one by one, in memory not much larger than they are."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, TypeAlias

import numpy as np

from .lookup import Ints

Matrix: TypeAlias = "np.ndarray[Any, np.dtype[np.uint8]]"

_SPARSE = 4  # a sheet of which fewer than one row in so many is still held is written anew
NONE = -1  # in place of a row's number


class Sheet:
    """What one call wrote: a row for each holder, in pieces that lie side by side."""

    __slots__ = ("held", "holders", "kind", "pieces")

    def __init__(self, pieces: list[Matrix], holders: Ints, kind: Any) -> None:
        """Write the rows of `pieces`, each for its holder."""
        self.pieces, self.holders, self.kind = pieces, holders, kind
        self.held = len(holders)


class Sheets:
    """Rows by holder: each holder holds one row at most, of any kind and length."""

    def __init__(self, holders: int = 0) -> None:
        """Make room for as many holders, none of which holds anything."""
        self._sheet: Ints = np.full(holders, NONE, np.int64)  # by number, in which a holder's row is
        self._row: Ints = np.zeros(holders, np.int64)
        self._sheets: dict[int, Sheet] = {}
        self._next = 0

    @property
    def nbytes(self) -> int:
        """How many bytes there are in all sheets."""
        return sum(piece.nbytes for sheet in self._sheets.values() for piece in sheet.pieces)

    def grow(self, holders: int) -> None:
        """Make room for more holders."""
        more = holders - len(self._sheet)
        self._sheet = np.concatenate([self._sheet, np.full(more, NONE, np.int64)])
        self._row = np.concatenate([self._row, np.zeros(more, np.int64)])

    def write(self, holders: Ints, pieces: list[Matrix], kind: Any) -> None:
        """Let each of these holders, no two the same, hold a row of `pieces`, which nobody else may change."""
        number = self._next
        self._next += 1
        self._sheets[number] = Sheet(pieces, holders, kind)
        before = self._sheet[holders]
        self._row[holders] = np.arange(len(holders))
        self._sheet[holders] = number
        self._let_go(before)

    def drop(self, holders: Ints) -> None:
        """Let these hold nothing."""
        before = self._sheet[holders]
        self._sheet[holders] = NONE
        self._let_go(before)

    def read(self, holder: int) -> tuple[Any, bytes] | None:
        """Return the kind and bytes of what is held, None for nothing."""
        number, row = int(self._sheet[holder]), int(self._row[holder])
        if number == NONE:
            return None
        sheet = self._sheets[number]
        return sheet.kind, b"".join([piece[row].tobytes() for piece in sheet.pieces])

    def _let_go(self, numbers: Ints) -> None:
        for number, count in _counted(numbers):
            sheet = self._sheets[number]
            sheet.held -= count
            if not sheet.held:
                del self._sheets[number]
            elif _SPARSE * sheet.held < len(sheet.holders):
                self._rewrite(number, sheet)

    def _rewrite(self, number: int, sheet: Sheet) -> None:
        """Write those rows alone that are still held."""
        rows = np.flatnonzero(self._sheet[sheet.holders] == number)
        holders = sheet.holders[rows]
        self._sheets[number] = Sheet([piece[rows] for piece in sheet.pieces], holders, sheet.kind)
        self._row[holders] = np.arange(len(rows))


def _counted(numbers: Ints) -> Iterator[tuple[int, int]]:
    if len(numbers) and (numbers == numbers[0]).all():  # the sessions of a tick often come together again
        pairs = [(int(numbers[0]), len(numbers))]
    else:
        pairs = list(zip(*(column.tolist() for column in np.unique(numbers, return_counts=True)), strict=True))
    return (pair for pair in pairs if pair[0] != NONE)
