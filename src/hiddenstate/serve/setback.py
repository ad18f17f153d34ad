"""Stores that are set back to an older copy: noticed by what a worker remembers, and told to the callers concerned."""

from __future__ import annotations

import logging
from typing import NamedTuple

from ..errors import SequenceGap
from .arena import Arena, SessionEntry
from .session_operations import Close, Import, Push, SessionOperation
from .stores import Claim

_log = logging.getLogger(__name__)


class KnownSession(NamedTuple):
    """What is remembered of a session while the store may have changed it."""

    version: int
    seq: int


class SetBackWatch:
    """Compares what the store has of a session with what this worker knew of it.

    A failover or a restored copy loses inputs that were acknowledged. An input with a number says itself where it
    belongs; one without would be applied to an older state, so the first of these is refused, with the reason.
    """

    def __init__(self) -> None:
        """Know nothing."""
        self._remembered: dict[str, KnownSession] = {}
        self._lost: dict[str, int] = {}  # sessions that turned out older, and the last input applied here
        self.count = 0  # of these since the start

    def remember(self, arena: Arena) -> None:
        """Keep what is known of the sessions in the arena, which is about to be cleared."""
        sessions = arena.sessions
        slots = arena.find(sessions)
        columns = (arena.table.version, arena.table.seq)
        known = map(KnownSession, *(column[slots].tolist() for column in columns))
        self._remembered = dict(zip(sessions, known, strict=True))

    def known(self, session: str, entry: SessionEntry | None) -> KnownSession | None:
        """Return what is known of a session, in the arena or from before it was cleared."""
        if entry is not None:
            return KnownSession(entry.version, entry.seq)
        return self._remembered.get(session)

    def compare(self, session: str, claim: Claim, known: KnownSession | None) -> None:
        """Note it where the store has an older session than the one that is known."""
        self._remembered.pop(session, None)
        if known is not None and claim.row is not None and claim.strayed:
            self.count += 1
            self._lost[session] = known.seq
            said = "the store was set back: it has session %r at input %d, and here it had come to %d"
            _log.warning(said, session, claim.row.seq, known.seq)

    def tell(self, op: SessionOperation, entry: SessionEntry) -> None:
        """Raise for the first input to a session that lost others, unless its number says where it belongs."""
        if op.session not in self._lost or not isinstance(op, Push | Close | Import):
            return
        before = self._lost.pop(op.session)
        if isinstance(op, Push) and (op.seq is None or op.seq > entry.seq + 1):
            raise SequenceGap(
                f"the store was set back to an older copy: session {op.session!r} had come to input {before}, and is "
                f"now at {entry.seq}. What was acknowledged after that is gone, and this input was not applied: send "
                f"those from {entry.seq + 1} on again, or go on from there.",
                entry.seq,
            )
