"""Sessions in this process's memory: gone when it ends."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from heapq import nsmallest
from typing import Any

from .store import Advance, Change, Claim, Row, Store


class MemoryStore(Store):
    """Sessions in a dict.

    >>> store = MemoryStore()
    >>> store.commit([Change("a", None, Row(0, 0, 0.0, 0.0, "model", None))])
    [1]
    >>> store.count()
    1
    """

    sealed = False

    def __init__(self) -> None:
        """Start empty."""
        # session -> version and what a Row is made of, as a bare tuple: making hundreds of named ones in a tick is felt
        self._rows: dict[str, tuple[int, tuple[Any, ...]]] = {}
        self._answers: dict[str, deque[tuple[int, Any]]] = {}
        self._version = 0
        self._swept: deque[str] = deque()

    def claim(self, wanted: Sequence[tuple[str, int]]) -> list[Claim | Any]:
        """Look each one up."""
        found: list[Claim | Any] = []
        for session, _ in wanted:
            held = self._rows.get(session)
            found.append(None if held is None else Claim(held[0], held[0], Row(*held[1])))
        return found

    def commit(self, changes: Sequence[Change]) -> list[int | None]:
        """Apply each change whose token still holds."""
        rows, answers = self._rows, self._answers
        versions: list[int | None] = []
        replay = self.replay
        self._version = version = self._version + 1
        for session, token, row, answer, anew in changes:
            held = rows.get(session)
            if (None if held is None else held[0]) != token:
                versions.append(None)
                continue
            if anew or row is None:
                answers.pop(session, None)
            if row is None:
                rows.pop(session, None)
                versions.append(0)
                continue
            rows[session] = (version, row)
            if answer is not None and replay:
                kept = answers.get(session)
                if kept is None:
                    kept = answers[session] = deque(maxlen=replay)
                kept.append((row.seq, answer))
            versions.append(version)
        return versions

    def advance(self, moved: Sequence[Advance], changes: Sequence[Change]) -> list[int | None]:
        """Do so without making a change of each."""
        rows, answers, replay = self._rows, self._answers, self.replay
        versions: list[int | None] = []
        version = self._version = self._version + 1
        for group in moved:
            touched, fingerprint = group.touched, group.fingerprint
            for session, token, seq, steps, opened, state, answer in zip(*group[:7], strict=True):
                held = rows.get(session)
                if held is None or held[0] != token:
                    versions.append(None)
                    continue
                rows[session] = (version, (seq, steps, opened, touched, fingerprint, state))
                if answer is not None and replay:
                    kept = answers.get(session)
                    if kept is None:
                        kept = answers[session] = deque(maxlen=replay)
                    kept.append((seq, answer))
                versions.append(version)
        return versions + self.commit(changes)

    def read(self, session: str) -> Row | None:
        """Look it up."""
        held = self._rows.get(session)
        return None if held is None else Row(*held[1])

    def answer(self, session: str, seq: int) -> Any:
        """Look among the last few."""
        return next((answer for kept, answer in self._answers.get(session, ()) if kept == seq), None)

    def sessions(self, prefix: str, after: str, limit: int) -> list[str]:
        """Sort what fits."""
        return nsmallest(limit, (name for name in self._rows if name.startswith(prefix) and name > after))

    def count(self) -> int:
        """Count them."""
        return len(self._rows)

    def sweep(self, before: float, limit: int) -> int:
        """Go through all sessions in turn, `limit` at a time."""
        if not self._swept:
            self._swept.extend(self._rows)
        gone = 0
        for _ in range(min(limit, len(self._swept))):
            session = self._swept.popleft()
            held = self._rows.get(session)
            if held is not None and held[1][3] < before:
                del self._rows[session]
                self._answers.pop(session, None)
                gone += 1
        return gone

    def close(self) -> None:
        """Forget everything."""
        self._rows.clear()
        self._answers.clear()
