"""Deciding each operation, given its session: an error, an answer or a change."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from ..errors import Overloaded, SequenceGap, SessionExists, SessionLost
from ..state import to_bytes
from .arena import Arena, SessionEntry
from .model import ServedModel
from .rollout import Rollout
from .session import Session, with_facts
from .session_operations import Close, Export, Fork, Import, Info, ListNames, Open, Push, Reset, SessionOperation
from .stores import Change, Row, Store


class Decision(NamedTuple):
    """What an operation comes to: a result, to be given once the change, if there is one, is durable."""

    result: Any
    change: Change | None = None
    again: bool = False  # the change only prepares the session: the operation comes again


class SessionPolicy:
    """Decides about operations from what is known of their sessions, and leaves it to the tick to change them.

    `entry` is what is known of a session, None where it does not exist, and `now` is the time of the tick.
    """

    def __init__(
        self, model: ServedModel, store: Store, arena: Arena, *, max_stored: int, rollout: Rollout | None = None
    ) -> None:
        """Allow up to `max_stored` sessions in the store; `rollout` says what becomes of other versions' sessions."""
        self._model, self._store, self._arena = model, store, arena
        self.max_stored, self._rollout = max_stored, rollout or Rollout(None, None)
        self.draining = False  # no sessions are begun here any more
        self._rules: dict[type[SessionOperation], Callable[[Any, SessionEntry | None, float], Decision]] = {
            Open: self._open,
            Close: self._close,
            Reset: self._reset,
            Import: self._import,
            Fork: self._fork,
            Info: self._info,
            Export: self._export,
            ListNames: self._list_names,
        }
        self._new = 0  # sessions that this tick adds

    def begin_tick(self) -> None:
        """Begin another tick."""
        self._new = 0

    def admit(self, push: Push, entry: SessionEntry | None, now: float) -> SessionEntry | Decision:
        """Return the session that an input is to be applied to, or the kept answer where it was applied before."""
        if (moved := self._moved(entry, now)) is not None:
            return moved
        entry = self._own(push, entry, now)
        if push.seq is None or push.seq == entry.seq + 1:
            return entry
        if push.seq <= entry.seq:
            kept = self._store.answer(push.session, push.seq)
            why = f"no longer kept: the last {self._store.replay} are"
            if kept is not None:
                try:
                    return Decision(self._model.stored_output(kept))
                except ValueError as error:  # a file that is damaged
                    why = f"damaged in the store ({error})"
            raise SequenceGap(
                f"input {push.seq} of session {push.session!r} was applied already (the last one is {entry.seq}), but "
                f"its answer is {why}. It was not applied again.",
                entry.seq,
            )
        raise SequenceGap(
            f"input {push.seq} does not follow the last one of session {push.session!r}, which is {entry.seq}: "
            f"{entry.seq + 1} comes next, and the first of a session is 1. Send those between first.",
            entry.seq,
        )

    def decide(self, op: SessionOperation, entry: SessionEntry | None, now: float) -> Decision:
        """Return what any other operation comes to."""
        if isinstance(op, Open | Fork) and (moved := self._moved(entry, now)) is not None:
            return moved
        return self._rules[type(op)](op, entry, now)

    def read_state(self, entry: SessionEntry) -> bytes:
        """Return the raw bytes of a state as it came from the store."""
        assert entry.state is not None
        if not self._store.sealed:
            return entry.state
        try:
            return self._model.format.unseal(entry.state, source=f"the stored state of session {entry.session!r}")
        except ValueError as error:  # a file that is damaged, or of another kind
            raise SessionLost(f"session {entry.session!r} is lost: {error}", "damaged") from error

    def _open(self, op: Open, entry: SessionEntry | None, now: float) -> Decision:
        if entry is not None and entry.damage is not None:
            if op.exist_ok:  # somebody who would go on with it has to know
                raise entry.damage
        elif entry is not None and not self._expired(entry, now):
            if op.exist_ok:
                self._own(op, entry, now)
                return Decision(op.session)
            raise SessionExists(
                f"there is a session {op.session!r} already, which has come to input {entry.seq}. "
                f"Go on with it (open(..., exist_ok=True)), or close it first."
            )
        self._make_room(op.session, entry, now)
        return Decision(op.session, self._change(op.session, entry, Row(0, 0, now, now, self._model.fingerprint, None)))

    def _close(self, op: Close, entry: SessionEntry | None, now: float) -> Decision:
        entry = self._known(op.session, entry)
        return Decision(None, Change(op.session, entry.token, None, None, True))

    def _reset(self, op: Reset, entry: SessionEntry | None, now: float) -> Decision:
        entry = self._alive(op.session, entry, now)
        self._leave_newer(entry)
        row = Row(entry.seq, entry.steps, entry.opened, now, self._model.fingerprint, None)
        return Decision(None, Change(op.session, entry.token, row))

    def _import(self, op: Import, entry: SessionEntry | None, now: float) -> Decision:
        if entry is not None and not self._expired(entry, now):
            self._leave_newer(entry)
        self._make_room(op.session, entry, now)
        row = Row(op.seq, op.steps, now, now, self._model.fingerprint, self._for_store(op.row))
        return Decision(op.session, self._change(op.session, entry, row))

    def _fork(self, op: Fork, entry: SessionEntry | None, now: float) -> Decision:
        entry = self._own(op, entry, now)
        if op.target == op.session or self._store.read(op.target) is not None:
            raise SessionExists(f"there is a session {op.target!r} already. Fork to another name, or close it first.")
        self._make_room(op.target, None, now)
        state = self._for_store(self._state_bytes(entry))
        forked = Row(entry.seq, entry.steps, now, now, entry.fingerprint, state)
        return Decision(op.target, Change(op.target, None, forked))

    def _info(self, op: Info, entry: SessionEntry | None, now: float) -> Decision:
        entry = self._alive(op.session, entry, now)
        expires = None if self._store.ttl is None else entry.touched + self._store.ttl
        return Decision(
            Session(
                id=op.session,
                seq=entry.seq,
                steps=entry.steps,
                opened=entry.opened,
                touched=entry.touched,
                expires=expires,
                fingerprint=entry.fingerprint,
                hot=self._arena.has(op.session),
            )
        )

    def _export(self, op: Export, entry: SessionEntry | None, now: float) -> Decision:
        entry = self._own(op, entry, now)
        row = self._state_bytes(entry)
        data = to_bytes(self._model.initial()) if row is None else self._model.format.seal(row)
        facts = {"fingerprint": entry.fingerprint, "seq": entry.seq, "steps": entry.steps, "anew": row is None}
        return Decision(with_facts(data, facts))

    def _list_names(self, op: ListNames, entry: SessionEntry | None, now: float) -> Decision:
        return Decision(self._store.sessions(op.session, op.after, op.limit))

    def _state_bytes(self, entry: SessionEntry) -> bytes | None:
        """Return the raw bytes of a session's state, None where it is in the initial state."""
        if entry.initial:
            return None
        if entry.slot >= 0:
            return self._model.format.rows(self._arena.gather(slice(entry.slot, entry.slot + 1)))[0]
        return self.read_state(entry)

    def _for_store(self, state: bytes | None) -> bytes | None:
        return self._model.format.seal(state) if state is not None and self._store.sealed else state

    def _change(self, session: str, entry: SessionEntry | None, row: Row) -> Change:
        return Change(session, None if entry is None else entry.token, row, None, True)

    def _make_room(self, session: str, entry: SessionEntry | None, now: float) -> None:
        """Refuse a new session where the store is full, even after expired sessions are removed from it."""
        if entry is not None:
            return
        if self.draining:
            raise Overloaded(
                f"this worker is being drained, so {session!r} cannot begin here. Ask again: another worker will "
                f"take it."
            )
        if self._store.count() + self._new >= self.max_stored:
            if self._store.ttl is not None:
                self._store.sweep(now - self._store.ttl, 1000)
            if self._store.count() + self._new >= self.max_stored:
                raise Overloaded(
                    f"the store holds {self.max_stored} sessions, so {session!r} cannot be added. Close some, let "
                    f"them expire sooner (ttl=...), or allow more: Engine(max_stored=...)."
                )
        self._new += 1

    def _known(self, session: str, entry: SessionEntry | None) -> SessionEntry:
        """Return the entry of a session that exists, or raise."""
        if entry is None:
            raise SessionLost(
                f"there is no session {session!r}: it was never opened, was closed, or expired long ago. "
                f"Begin it with open({session!r}).",
                "unknown",
            )
        return entry

    def _expired(self, entry: SessionEntry, now: float) -> bool:
        return self._store.ttl is not None and now - entry.touched > self._store.ttl

    def _alive(self, session: str, entry: SessionEntry | None, now: float) -> SessionEntry:
        """Return the entry of a session that exists and has not expired, or raise."""
        entry = self._known(session, entry)
        if self._expired(entry, now):
            raise SessionLost(
                f"session {session!r} expired: its last input came {now - entry.touched:.1f} s ago, and sessions are "
                f"kept for {self._store.ttl:g} s. Begin it anew with open({session!r}).",
                "expired",
            )
        return entry

    def _own(self, op: SessionOperation, entry: SessionEntry | None, now: float) -> SessionEntry:
        """Return the entry of a session that also belongs to this model, or raise."""
        entry = self._alive(op.session, entry, now)
        if not self._owns(entry):
            raise self._rollout.refusal(entry, self._model.fingerprint)
        return entry

    def _owns(self, entry: SessionEntry) -> bool:
        if self._rollout.moves(entry.fingerprint):  # also where it is the same model's, from before it had a version
            return False
        own = self._model.fingerprint
        return self._model.owns(entry.fingerprint) or self._rollout.adopts(entry.fingerprint, own)

    def _leave_newer(self, entry: SessionEntry) -> None:
        """Raise for a session that a worker of a later version has moved on: this one must not take it back."""
        if self._rollout.newer(entry.fingerprint):
            raise self._rollout.refusal(entry, self._model.fingerprint)

    def _moved(self, entry: SessionEntry | None, now: float) -> Decision | None:
        """Return the change that makes a session one of this version, None where it is one or cannot become one."""
        own = self._model.fingerprint
        if entry is None or entry.damage is not None or entry.fingerprint == own or self._expired(entry, now):
            return None
        if not self._store.sealed and not entry.initial:
            return None
        if self._owns(entry):  # by the name that the same model had before
            state = entry.state
        elif self._rollout.moves(entry.fingerprint):
            state = self._for_store(self._rollout.migrated(entry, self._model.format))
        else:
            return None
        row = Row(entry.seq, entry.steps, entry.opened, entry.touched, own, state)
        return Decision(None, Change(entry.session, entry.token, row), again=True)
