"""Sessions in this process's memory, which are lost when it ends."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from heapq import nsmallest
from typing import Any, TypeAlias

import numpy as np

from .store import Advance, Change, Claim, Ints, Lookup, Row, Store

_Matrix: TypeAlias = "np.ndarray[Any, np.dtype[np.uint8]]"

# The rows of the table of sessions: numbers only, so that one assignment writes them all, whatever interrupts a commit.
_VERSION, _SEQ, _STEPS, _MODEL, _STATE, _OPENED, _TOUCHED = range(7)
_FIRST = 256  # sessions to allocate room for at first
_NONE = -1  # in place of a number: there is no state, or the slot is empty
_SPARSE = 4  # a segment is rewritten when less than one row in this many is still in use


class Segment:
    """The rows of one `write`, one for each slot, as arrays to be joined along bytes."""

    __slots__ = ("kind", "pieces", "slots", "used")

    def __init__(self, pieces: list[_Matrix], slots: Ints, kind: Any) -> None:
        """Hold the rows of `pieces`, each for its slot."""
        self.pieces, self.slots, self.kind = pieces, slots, kind
        self.used = len(slots)


class SegmentedBuffer:
    """Rows of bytes by slot, of any length: written by the hundred, replaced one by one.

    Each write makes a segment. A segment is rewritten when few of its rows are still in use, so the buffer is never
    much larger than its rows.
    """

    def __init__(self, slots: int = 0) -> None:
        """Make this many slots, all of them empty."""
        self._segment: Ints = np.full(slots, _NONE, np.int64)  # the number of the segment that each slot's row is in
        self._row: Ints = np.zeros(slots, np.int64)
        self._segments: dict[int, Segment] = {}
        self._next = 0

    @property
    def nbytes(self) -> int:
        """The bytes in all segments."""
        return sum(piece.nbytes for segment in self._segments.values() for piece in segment.pieces)

    def grow(self, slots: int) -> None:
        """Add slots, up to this many in all."""
        more = slots - len(self._segment)
        self._segment = np.concatenate([self._segment, np.full(more, _NONE, np.int64)])
        self._row = np.concatenate([self._row, np.zeros(more, np.int64)])

    def write(self, slots: Ints, pieces: list[_Matrix], kind: Any) -> None:
        """Put a row of `pieces`, which nobody else may change, into each of these slots, no two of them the same."""
        number = self._next
        self._next += 1
        self._segments[number] = Segment(pieces, slots, kind)
        before = self._segment[slots]
        self._row[slots] = np.arange(len(slots))
        self._segment[slots] = number
        self._release(before)

    def drop(self, slots: Ints) -> None:
        """Empty these slots."""
        before = self._segment[slots]
        self._segment[slots] = _NONE
        self._release(before)

    def read(self, slot: int) -> tuple[Any, bytes] | None:
        """Return the kind and bytes of the row in a slot, None where it is empty."""
        number, row = int(self._segment[slot]), int(self._row[slot])
        if number == _NONE:
            return None
        segment = self._segments[number]
        return segment.kind, b"".join([piece[row].tobytes() for piece in segment.pieces])

    def _release(self, numbers: Ints) -> None:
        for number, count in _counted(numbers):
            segment = self._segments[number]
            segment.used -= count
            if not segment.used:
                del self._segments[number]
            elif _SPARSE * segment.used < len(segment.slots):
                self._rewrite(number, segment)

    def _rewrite(self, number: int, segment: Segment) -> None:
        """Keep only the rows that are still in use."""
        rows = np.flatnonzero(self._segment[segment.slots] == number)
        slots = segment.slots[rows]
        self._segments[number] = Segment([piece[rows] for piece in segment.pieces], slots, segment.kind)
        self._row[slots] = np.arange(len(rows))


def _counted(numbers: Ints) -> Iterator[tuple[int, int]]:
    if len(numbers) and (numbers == numbers[0]).all():  # the sessions of a tick often come together again
        pairs = [(int(numbers[0]), len(numbers))]
    else:
        pairs = list(zip(*(column.tolist() for column in np.unique(numbers, return_counts=True)), strict=True))
    return (pair for pair in pairs if pair[0] != _NONE)


class MemoryStore(Store):
    """Sessions in a table with a column for each: a tick changes hundreds of them at once.

    >>> store = MemoryStore()
    >>> store.commit([Change("a", None, Row(0, 0, 0.0, 0.0, "model", None))])
    [1]
    >>> store.count()
    1
    """

    chains = True
    sealed = False

    def __init__(self) -> None:
        """Start empty."""
        self._where = Lookup()
        self._free: list[int] = []
        self._table: Ints = np.zeros((7, 0), np.int64)
        self._states = SegmentedBuffer()  # two slots for each session: a new state is written beside the old one
        self._answers = SegmentedBuffer()  # as many slots for each session as answers are kept
        self._numbers: Ints = np.zeros(0, np.int64)  # of the inputs to which these are the answers
        self._kept = 0
        self._models: dict[str, int] = {}
        self._version = 0
        self._swept: deque[str] = deque()

    def claim(self, wanted: Sequence[tuple[str, int]]) -> list[Claim | Any]:
        """Look each one up."""
        return [self._claim(session) for session, _ in wanted]

    def commit(self, changes: Sequence[Change]) -> list[int | None]:
        """Apply each change whose token still holds."""
        self._version += 1
        return [self._apply(change) for change in changes]

    def advance(self, advances: Sequence[Advance], changes: Sequence[Change]) -> list[int | None]:
        """Write each batch as a whole."""
        versions: list[int | None] = []
        self._version += 1
        for batch in advances:
            places = self._where.all(batch.sessions)
            good = (places >= 0) & (self._table[_VERSION][places] == batch.tokens)
            if good.all():
                self._move(batch, places, slice(None))
                versions += [self._version] * len(places)
            else:
                self._move(batch, places[good], np.flatnonzero(good))
                versions += [self._version if holds else None for holds in good.tolist()]
        return versions + self.commit(changes)

    def read(self, session: str) -> Row | None:
        """Look it up."""
        found = self._claim(session)
        return None if found is None else found.row

    def answer(self, session: str, seq: int) -> Any:
        """Read the slot in which it would be."""
        place = self._where.names.get(session)
        if place is None or not self._kept:
            return None
        slot = place * self._kept + seq % self._kept
        found = self._answers.read(slot) if self._numbers[slot] == seq else None
        if found is None:
            return None
        return found[1] if found[0] is None else found

    def sessions(self, prefix: str, after: str, limit: int) -> list[str]:
        """Sort the names that fit."""
        return nsmallest(limit, (name for name in self._where.names if name.startswith(prefix) and name > after))

    def count(self) -> int:
        """Count them."""
        return len(self._where.names)

    def sweep(self, before: float, limit: int) -> int:
        """Look at the next `limit` sessions; calls go around all of them."""
        if not self._swept:
            self._swept.extend(self._where.names)
        gone = 0
        for _ in range(min(limit, len(self._swept))):
            session = self._swept.popleft()
            place = self._where.names.get(session)
            if place is not None and self._times[_TOUCHED, place] < before:
                self._remove(session, place)
                gone += 1
        return gone

    def close(self) -> None:
        """Forget everything."""
        self.__init__()  # type: ignore[misc]

    def _claim(self, session: str) -> Claim | None:
        place = self._where.names.get(session)
        if place is None:
            return None
        version, seq, steps, model, which, *_ = self._table[:, place].tolist()
        opened, touched = self._times[_OPENED:, place].tolist()
        held = None if which == _NONE else self._states.read(2 * place + which)
        fingerprint = next(name for name, number in self._models.items() if number == model)
        return Claim(version, version, Row(seq, steps, opened, touched, fingerprint, None if held is None else held[1]))

    def _move(self, batch: Advance, places: Ints, rows: slice | Ints) -> None:
        """Write rows of a batch: first answers and states, then the table, which makes them valid."""
        self._make_room(0)
        if self._kept and batch.answers is not None:
            self._keep_all(batch, places, rows)
        which = (self._table[_STATE][places] == 0).astype(np.int64)
        self._states.write(2 * places + which, [piece[rows] for piece in batch.states.pieces()], None)
        columns = np.empty((7, len(places)), np.int64)
        columns[_VERSION], columns[_MODEL], columns[_STATE] = self._version, self._model(batch.fingerprint), which
        columns[_SEQ], columns[_STEPS] = batch.seqs[rows], batch.steps[rows]
        times = columns.view(np.float64)
        times[_OPENED], times[_TOUCHED] = batch.opened[rows], batch.touched
        self._table[:, places] = columns
        self._states.drop(2 * places + 1 - which)

    def _keep_all(self, batch: Advance, places: Ints, rows: slice | Ints) -> None:
        assert batch.answers is not None
        pieces, kind = batch.answers.pieces(), batch.answers.kind
        if batch.inputs == 1:
            numbers = batch.seqs[rows]
            slots = places * self._kept + numbers % self._kept
            self._keep(slots, numbers, [piece[rows] for piece in pieces], kind)
            return
        each, which = batch.last(self._kept)
        slots = places[:, None] * self._kept + each[rows] % self._kept
        self._keep(slots.ravel(), each[rows].ravel(), [piece[which[rows].ravel()] for piece in pieces], kind)

    def _keep(self, slots: Ints, numbers: Ints, pieces: list[Any], kind: Any) -> None:
        self._numbers[slots] = numbers
        self._answers.write(slots, pieces, kind)

    def _apply(self, change: Change) -> int | None:
        session, token, row, answer, anew = change
        place = self._where.names.get(session)
        if (None if place is None else int(self._table[_VERSION, place])) != token:
            return None
        if row is None:
            assert place is not None
            self._remove(session, place)
            return 0
        if place is None:
            self._make_room(1)
            place = self._free.pop()
            self._table[_STATE, place] = _NONE
        if anew:
            self._forget(place)
        at = np.array([place])
        if answer is not None and self._kept:
            kind, data = answer if isinstance(answer, tuple) else (None, answer)
            self._keep(at * self._kept + row.seq % self._kept, np.array([row.seq]), [_as_matrix(data)], kind)
        which = _NONE if row.state is None else int(self._table[_STATE, place] == 0)
        if row.state is not None:
            self._states.write(2 * at + which, [_as_matrix(row.state)], None)
        columns = np.array([self._version, row.seq, row.steps, self._model(row.fingerprint), which, 0, 0], np.int64)
        columns.view(np.float64)[_OPENED:] = row.opened, row.touched
        self._table[:, place] = columns
        self._states.drop(np.array([2 * place + other for other in (0, 1) if other != which]))
        self._where.add(session, place)
        return self._version

    def _remove(self, session: str, place: int) -> None:
        self._where.remove(session)
        self._forget(place)
        self._states.drop(np.array([2 * place, 2 * place + 1]))
        self._table[:, place] = 0
        self._free.append(place)

    def _forget(self, place: int) -> None:
        """Drop a session's answers."""
        slots = np.arange(place * self._kept, (place + 1) * self._kept)
        self._numbers[slots] = 0
        self._answers.drop(slots)

    def _model(self, fingerprint: str) -> int:
        return self._models.setdefault(fingerprint, len(self._models))

    def _make_room(self, count: int) -> None:
        size = self._table.shape[1]
        if self._kept != self.replay:
            self._kept, self._answers = self.replay, SegmentedBuffer(size * self.replay)
            self._numbers = np.zeros(size * self.replay, np.int64)
        if len(self._free) < count:
            larger = max(_FIRST, 2 * size)
            self._table = np.concatenate([self._table, np.zeros((7, larger - size), np.int64)], axis=1)
            self._states.grow(2 * larger)
            self._answers.grow(self._kept * larger)
            self._numbers = np.concatenate([self._numbers, np.zeros(self._kept * (larger - size), np.int64)])
            self._free.extend(range(larger - 1, size - 1, -1))

    @property
    def _times(self) -> Any:
        return self._table.view(np.float64)


def _as_matrix(data: bytes) -> Any:
    return np.frombuffer(data, np.uint8)[None]
