"""Noticing that a store was set back to an older copy, by what a worker remembers, and telling the callers."""

from __future__ import annotations

import logging
from typing import NamedTuple

from ..errors import SequenceGap
from .arena import Arena, SessionEntry
from .session_operations import Close, Import, Push, SessionOperation
from .stores import Claim

_log = logging.getLogger(__name__)
_REMEMBERED = 4  # sessions for each that has room in memory


class KnownSession(NamedTuple):
    """What is remembered of a session while the store may have changed it."""

    version: int
    seq: int
    elsewhere: bool = False  # another store has taken the place of the one that it is known of


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

    def remember(self, arena: Arena, *, replaced: bool = False) -> None:
        """Keep what is known of the sessions in the arena, which is about to be cleared.

        `replaced` says that another store has taken the place of the one that all of this is known of: whatever numbers
        it counts in, sessions there are others unless they are the very same.
        """
        sessions = arena.sessions
        slots = arena.find(sessions)
        columns = (arena.table.version, arena.table.seq)
        known = map(KnownSession, *(column[slots].tolist() for column in columns))
        self._keep(dict(zip(sessions, known, strict=True)), arena.size)
        if replaced:
            self._remembered = {name: known._replace(elsewhere=True) for name, known in self._remembered.items()}

    def forgotten(self, session: str, arena: Arena) -> None:
        """Keep what is known of one session, which is about to be dropped from the arena although nobody changed it."""
        if (entry := arena.entry(session)) is not None:
            self._keep({session: KnownSession(entry.version, entry.seq)}, arena.size)

    def _keep(self, known: dict[str, KnownSession], size: int) -> None:
        """Remember these, and of those from before as many as there is room for."""
        if len(self._remembered) > _REMEMBERED * size:
            self._remembered = dict(list(self._remembered.items())[-size:])
        self._remembered |= known

    def known(self, session: str, entry: SessionEntry | None) -> KnownSession | None:
        """Return what is known of a session, in the arena or from before it was cleared."""
        if entry is not None:
            return KnownSession(entry.version, entry.seq)
        return self._remembered.get(session)

    def compare(self, session: str, claim: Claim, known: KnownSession | None) -> None:
        """Note it where the store has an older session than the one that is known."""
        if known is None or claim.row is None:
            return
        if session in self._remembered:  # until it is in the arena, which not every look at it leads to
            self._remembered[session] = KnownSession(claim.version, claim.row.seq)
        if claim.strayed or (known.elsewhere and claim.version != known.version):
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
            where, then = f"is now at {entry.seq}", f"send those from {entry.seq + 1} on again, or go on from there"
            if entry.seq >= before:
                where = f"has come to {entry.seq} since, by other inputs"
                then = "the numbers of those that are gone are taken, so send them as new ones, or go on from there"
            raise SequenceGap(
                f"the store was set back to an older copy: session {op.session!r} had come to input {before}, and "
                f"{where}. What was acknowledged after that copy was made is gone, and this input was not applied: "
                f"{then}.",
                entry.seq,
            )
