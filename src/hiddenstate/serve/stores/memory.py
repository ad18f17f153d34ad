"""Sessions in this process's memory: gone when it ends."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from heapq import nsmallest
from typing import Any

import numpy as np

from .lookup import Ints, Lookup
from .sheets import NONE, Sheets
from .store import Advance, Change, Claim, Row, Store

# What is kept of a session beside its state and answers: one table of numbers, so that all of it changes at once,
# whatever interrupts a commit.
_VERSION, _SEQ, _STEPS, _MODEL, _STATE, _OPENED, _TOUCHED = range(7)
_FIRST = 256  # sessions to make room for


class MemoryStore(Store):
    """Sessions in columns: what a tick does to hundreds of them is done to all at once.

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
        self._facts: Ints = np.zeros((7, 0), np.int64)
        self._states = Sheets()  # two holders for each session: a new state is written beside the old one
        self._answers = Sheets()  # as many holders for each session as answers are kept
        self._numbers: Ints = np.zeros(0, np.int64)  # of the inputs that these are the answers to
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

    def advance(self, moved: Sequence[Advance], changes: Sequence[Change]) -> list[int | None]:
        """Write everything by columns."""
        versions: list[int | None] = []
        self._version += 1
        for group in moved:
            places = self._where.all(group.sessions)
            good = (places >= 0) & (self._facts[_VERSION][places] == group.tokens)
            if good.all():
                self._move(group, places, slice(None))
                versions += [self._version] * len(places)
            else:
                self._move(group, places[good], np.flatnonzero(good))
                versions += [self._version if holds else None for holds in good.tolist()]
        return versions + self.commit(changes)

    def read(self, session: str) -> Row | None:
        """Look it up."""
        found = self._claim(session)
        return None if found is None else found.row

    def answer(self, session: str, seq: int) -> Any:
        """Look in the place where it would be."""
        place = self._where.names.get(session)
        if place is None or not self._kept:
            return None
        holder = place * self._kept + seq % self._kept
        found = self._answers.read(holder) if self._numbers[holder] == seq else None
        if found is None:
            return None
        return found[1] if found[0] is None else found

    def sessions(self, prefix: str, after: str, limit: int) -> list[str]:
        """Sort what fits."""
        return nsmallest(limit, (name for name in self._where.names if name.startswith(prefix) and name > after))

    def count(self) -> int:
        """Count them."""
        return len(self._where.names)

    def sweep(self, before: float, limit: int) -> int:
        """Go through all sessions in turn, `limit` at a time."""
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
        version, seq, steps, model, which, *_ = self._facts[:, place].tolist()
        opened, touched = self._times[_OPENED:, place].tolist()
        held = None if which == NONE else self._states.read(2 * place + which)
        fingerprint = next(name for name, number in self._models.items() if number == model)
        return Claim(version, version, Row(seq, steps, opened, touched, fingerprint, None if held is None else held[1]))

    def _move(self, group: Advance, places: Ints, rows: slice | Ints) -> None:
        """Write what has become of these rows of a group: answers and states first, and then that they hold."""
        self._make_room(0)
        if self._kept and group.answers is not None:
            self._keep_all(group, places, rows)
        which = (self._facts[_STATE][places] == 0).astype(np.int64)
        self._states.write(2 * places + which, [piece[rows] for piece in group.states.pieces()], None)
        facts = np.empty((7, len(places)), np.int64)
        facts[_VERSION], facts[_MODEL], facts[_STATE] = self._version, self._model(group.fingerprint), which
        facts[_SEQ], facts[_STEPS] = group.seqs[rows], group.steps[rows]
        times = facts.view(np.float64)
        times[_OPENED], times[_TOUCHED] = group.opened[rows], group.touched
        self._facts[:, places] = facts
        self._states.drop(2 * places + 1 - which)

    def _keep_all(self, group: Advance, places: Ints, rows: slice | Ints) -> None:
        assert group.answers is not None
        pieces, kind = group.answers.pieces(), group.answers.kind
        if group.inputs == 1:
            numbers = group.seqs[rows]
            holders = places * self._kept + numbers % self._kept
            self._keep(holders, numbers, [piece[rows] for piece in pieces], kind)
            return
        each, which = group.last(self._kept)
        holders = places[:, None] * self._kept + each[rows] % self._kept
        self._keep(holders.ravel(), each[rows].ravel(), [piece[which[rows].ravel()] for piece in pieces], kind)

    def _keep(self, holders: Ints, numbers: Ints, pieces: list[Any], kind: Any) -> None:
        self._numbers[holders] = numbers
        self._answers.write(holders, pieces, kind)

    def _apply(self, change: Change) -> int | None:
        session, token, row, answer, anew = change
        place = self._where.names.get(session)
        if (None if place is None else int(self._facts[_VERSION, place])) != token:
            return None
        if row is None:
            assert place is not None
            self._remove(session, place)
            return 0
        if place is None:
            self._make_room(1)
            place = self._free.pop()
            self._facts[_STATE, place] = NONE
        if anew:
            self._forget(place)
        at = np.array([place])
        if answer is not None and self._kept:
            kind, data = answer if isinstance(answer, tuple) else (None, answer)
            self._keep(at * self._kept + row.seq % self._kept, np.array([row.seq]), [_matrix(data)], kind)
        which = NONE if row.state is None else int(self._facts[_STATE, place] == 0)
        if row.state is not None:
            self._states.write(2 * at + which, [_matrix(row.state)], None)
        facts = np.array([self._version, row.seq, row.steps, self._model(row.fingerprint), which, 0, 0], np.int64)
        facts.view(np.float64)[_OPENED:] = row.opened, row.touched
        self._facts[:, place] = facts
        self._states.drop(np.array([2 * place + other for other in (0, 1) if other != which]))
        self._where.add(session, place)
        return self._version

    def _remove(self, session: str, place: int) -> None:
        self._where.remove(session)
        self._forget(place)
        self._states.drop(np.array([2 * place, 2 * place + 1]))
        self._facts[:, place] = 0
        self._free.append(place)

    def _forget(self, place: int) -> None:
        """Drop a session's answers."""
        holders = np.arange(place * self._kept, (place + 1) * self._kept)
        self._numbers[holders] = 0
        self._answers.drop(holders)

    def _model(self, fingerprint: str) -> int:
        return self._models.setdefault(fingerprint, len(self._models))

    def _make_room(self, count: int) -> None:
        size = self._facts.shape[1]
        if self._kept != self.replay:
            self._kept, self._answers = self.replay, Sheets(size * self.replay)
            self._numbers = np.zeros(size * self.replay, np.int64)
        if len(self._free) < count:
            larger = max(_FIRST, 2 * size)
            self._facts = np.concatenate([self._facts, np.zeros((7, larger - size), np.int64)], axis=1)
            self._states.grow(2 * larger)
            self._answers.grow(self._kept * larger)
            self._numbers = np.concatenate([self._numbers, np.zeros(self._kept * (larger - size), np.int64)])
            self._free.extend(range(larger - 1, size - 1, -1))

    @property
    def _times(self) -> Any:
        return self._facts.view(np.float64)


def _matrix(data: bytes) -> Any:
    return np.frombuffer(data, np.uint8)[None]
