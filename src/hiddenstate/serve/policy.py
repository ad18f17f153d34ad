"""What is to become of an operation, given the session it is about: an error, an answer, or a change."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from ..errors import Overloaded, SequenceGap, SessionExists, SessionLost
from ..state import to_bytes
from .arena import Slab
from .exporting import with_facts
from .facts import Entry
from .inputs import Push
from .model import Served
from .session import Session
from .session_operations import Close, Export, Fork, Import, Info, Names, Op, Open, Reset
from .stores import Change, Row, Store


class Plan(NamedTuple):
    """What an operation comes to: a result, once the change, if there is one, is durable."""

    result: Any
    change: Change | None = None


class Deciding:
    """Holds operations against what is known of their sessions. It changes nothing."""

    def __init__(self, served: Served, store: Store, slab: Slab, *, limit: int, answered: Callable[[Any], Any]) -> None:
        """Allow up to `limit` sessions in the store; `answered` makes a kept answer what the caller got."""
        self._served, self._store, self._slab = served, store, slab
        self._limit, self._answered = limit, answered
        self._plans: dict[type[Op], Callable[[Any, Entry | None, float], Plan]] = {
            Open: self._open,
            Close: self._close,
            Reset: self._reset,
            Import: self._import,
            Fork: self._fork,
            Info: self._info,
            Export: self._export,
            Names: self._names,
        }
        self._new = 0  # sessions that this tick adds

    def begin(self) -> None:
        """Begin another tick."""
        self._new = 0

    def admit(self, push: Push, entry: Entry | None, now: float) -> Entry | Plan:
        """Return the session that an input is to be applied to, or what was answered to it before."""
        entry = self._own(push, entry, now)
        if push.seq is None or push.seq == entry.seq + 1:
            return entry
        if push.seq <= entry.seq:
            kept = self._store.answer(push.session, push.seq)
            if kept is not None:
                return Plan(self._answered(kept))
            raise SequenceGap(
                f"input {push.seq} of session {push.session!r} was applied already (the last one is {entry.seq}), but "
                f"its answer is no longer kept: the last {self._store.replay} are. It was not applied again.",
                entry.seq,
            )
        raise SequenceGap(
            f"input {push.seq} does not follow the last one of session {push.session!r}, which is {entry.seq}: "
            f"{entry.seq + 1} comes next, and the first of a session is 1. Send those between first.",
            entry.seq,
        )

    def plan(self, op: Op, entry: Entry | None, now: float) -> Plan:
        """Return what any other operation comes to."""
        return self._plans[type(op)](op, entry, now)

    def _open(self, op: Open, entry: Entry | None, now: float) -> Plan:
        if entry is not None and not self._expired(entry, now):
            if op.exist_ok:
                self._own(op, entry, now)
                return Plan(op.session)
            raise SessionExists(
                f"there is a session {op.session!r} already, which has come to input {entry.seq}. "
                f"Go on with it (open(..., exist_ok=True)), or close it first."
            )
        self._make_room(op.session, entry, now)
        return Plan(op.session, self._change(op.session, entry, Row(0, 0, now, now, self._served.fingerprint, None)))

    def _close(self, op: Close, entry: Entry | None, now: float) -> Plan:
        entry = self._known(op.session, entry)
        return Plan(None, Change(op.session, entry.token, None, None, True))

    def _reset(self, op: Reset, entry: Entry | None, now: float) -> Plan:
        entry = self._alive(op.session, entry, now)
        row = Row(entry.seq, entry.steps, entry.opened, now, self._served.fingerprint, None)
        return Plan(None, Change(op.session, entry.token, row))

    def _import(self, op: Import, entry: Entry | None, now: float) -> Plan:
        self._make_room(op.session, entry, now)
        state = op.row if not self._store.sealed or op.row is None else self._served.format.seal(op.row)
        row = Row(op.seq, op.steps, now, now, self._served.fingerprint, state)
        return Plan(op.session, self._change(op.session, entry, row))

    def _fork(self, op: Fork, entry: Entry | None, now: float) -> Plan:
        entry = self._own(op, entry, now)
        taken = self._store.read(op.target)
        if taken is not None:
            raise SessionExists(f"there is a session {op.target!r} already. Fork to another name, or close it first.")
        self._make_room(op.target, None, now)
        row = self._bare(entry)
        state = row if row is None or not self._store.sealed else self._served.format.seal(row)
        forked = Row(entry.seq, entry.steps, now, now, entry.fingerprint, state)
        return Plan(op.target, Change(op.target, None, forked))

    def _info(self, op: Info, entry: Entry | None, now: float) -> Plan:
        entry = self._alive(op.session, entry, now)
        expires = None if self._store.ttl is None else entry.touched + self._store.ttl
        facts = (entry.seq, entry.steps, entry.opened, entry.touched, expires, entry.fingerprint)
        return Plan(Session(op.session, *facts, hot=self._slab.has(op.session)))

    def _export(self, op: Export, entry: Entry | None, now: float) -> Plan:
        entry = self._own(op, entry, now)
        row = self._bare(entry)
        data = to_bytes(self._served.initial()) if row is None else self._served.format.seal(row)
        facts = {"fingerprint": entry.fingerprint, "seq": entry.seq, "steps": entry.steps, "anew": row is None}
        return Plan(with_facts(data, facts))

    def _names(self, op: Names, entry: Entry | None, now: float) -> Plan:
        return Plan(self._store.sessions(op.session, op.after, op.limit))

    def _bare(self, entry: Entry) -> bytes | None:
        """Return the bare bytes of a session's state, None where it starts anew."""
        if entry.anew:
            return None
        if entry.slot >= 0:
            return self._served.format.rows(self._slab.gather(slice(entry.slot, entry.slot + 1)))[0]
        assert entry.state is not None
        return read_state(self._served, self._store, entry)

    def _change(self, session: str, entry: Entry | None, row: Row) -> Change:
        return Change(session, None if entry is None else entry.token, row, None, True)

    def _make_room(self, session: str, entry: Entry | None, now: float) -> None:
        if entry is not None:
            return
        if self._store.count() + self._new >= self._limit:
            if self._store.ttl is not None:
                self._store.sweep(now - self._store.ttl, 1000)
            if self._store.count() + self._new >= self._limit:
                raise Overloaded(
                    f"the store holds {self._limit} sessions, so {session!r} cannot be added. Close some, let them "
                    f"expire sooner (ttl=...), or allow more: Engine(max_stored=...)."
                )
        self._new += 1

    def _known(self, session: str, entry: Entry | None) -> Entry:
        if entry is None:
            raise SessionLost(
                f"there is no session {session!r}: it was never opened, was closed, or expired long ago. "
                f"Begin it with open({session!r}).",
                "unknown",
            )
        return entry

    def _expired(self, entry: Entry, now: float) -> bool:
        return self._store.ttl is not None and now - entry.touched > self._store.ttl

    def _alive(self, session: str, entry: Entry | None, now: float) -> Entry:
        entry = self._known(session, entry)
        if self._expired(entry, now):
            raise SessionLost(
                f"session {session!r} expired: its last input came {now - entry.touched:.1f} s ago, and sessions are "
                f"kept for {self._store.ttl:g} s. Begin it anew with open({session!r}).",
                "expired",
            )
        return entry

    def _own(self, op: Op, entry: Entry | None, now: float) -> Entry:
        entry = self._alive(op.session, entry, now)
        if entry.fingerprint != self._served.fingerprint:
            raise SessionLost(
                f"session {op.session!r} belongs to another model ({entry.fingerprint}) than the one served now "
                f"({self._served.fingerprint}): its state means nothing to this one. Serve that model again, or let "
                f"the session start anew with reset({op.session!r}).",
                "model",
            )
        return entry


def read_state(served: Served, store: Store, entry: Entry) -> bytes:
    """Return the bare bytes of a state as it came from the store."""
    assert entry.state is not None
    if not store.sealed:
        return entry.state
    try:
        return served.format.unseal(entry.state, source=f"the stored state of session {entry.session!r}")
    except ValueError as error:  # a file that is damaged, or of another kind
        raise SessionLost(f"session {entry.session!r} is lost: {error}", "damaged") from error
