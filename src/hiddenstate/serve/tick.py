"""One tick: look sessions up, decide, run the model, commit, and only then move on the states in the arena.

A tick is one transaction of the store. It sets the result of every operation in it; the worker that runs the tick
delivers these results to the callers.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import numpy as np

from ..errors import Overloaded, ServeError, StoreBusy
from .arena import Arena, SessionEntry, as_slots
from .batch import Batch, BatchResult, BatchRunner, RowInput, first_push
from .claims import SessionClaims
from .model import ServedModel
from .policy import Decision, SessionPolicy
from .queue import OperationQueue
from .session_operations import (
    LATER,
    PENDING,
    Push,
    PushChain,
    PushMany,
    SessionOperation,
    flattened,
)
from .stores import Advance, Blobs, Ints, Store

_log = logging.getLogger(__name__)

_Bools: TypeAlias = "np.ndarray[tuple[int], np.dtype[np.bool_]]"
_LARGEST = 2**63 - 1  # no session comes so far
_PATIENCE = 30.0  # seconds after which an operation whose session others keep changing gives up
_SWEPT_AT_ONCE = 1000
_LONGEST_SWEEP = 30.0  # seconds in which all sessions are looked at


class TickRunner:
    """Runs ticks, one at a time. Nothing else touches the arena, the store's sessions or the model."""

    def __init__(
        self,
        model: ServedModel,
        store: Store,
        queue: OperationQueue,
        *,
        arena: Arena,
        policy: SessionPolicy,
        clock: Callable[[], float],
    ) -> None:
        """Do with sessions as `policy` says; inputs of a chain that cannot be run go back to `queue`."""
        self._model, self._store, self._queue, self._arena, self._clock = model, store, queue, arena, clock
        self._policy = policy
        gather = arena.view if model.pure else arena.gather
        self._batches = BatchRunner(model, gather, keep_answers=store.replay > 0, put_back=queue.put_back)
        self._claims = SessionClaims(model, store, arena, delay=self._delay)
        self._number = 0  # of the tick
        self.delayed: list[tuple[SessionOperation, float]] = []  # to be queued again after the tick: operation, seconds
        self.model_seconds = 0.0  # within calls of the model, since the start
        self.set_back = self._claims.set_back

    def run(self, ops: list[SessionOperation], *, patient: bool = True) -> None:
        """Run a tick with these operations, at most one of each session.

        Unless `patient`, nothing waits for a lock that somebody else has on the store: the tick comes again later.
        """
        self._number += 1
        self._store.patient = patient
        try:
            self._run([op for op in self._apart(ops) if self._wanted(op)])
        except StoreBusy as error:
            if patient:
                self._give_up(ops, error)
            else:
                self._put_off(ops)
        except ServeError as error:
            self._give_up(ops, error)
        except Exception as error:  # a mistake of ours must not end the thread that all callers wait for
            _log.exception("a tick failed")
            self._give_up(ops, ServeError(f"the engine failed within a tick: {type(error).__name__}: {error}"))
        except BaseException:
            self._give_up(ops, ServeError("the engine was interrupted within a tick. Repeat the input with its seq."))
            raise

    def sweep(self) -> float:
        """Remove some sessions that expired long ago from the store; return the seconds until more should be."""
        assert self._store.ttl is not None
        longest = min(_LONGEST_SWEEP, self._store.ttl / 4)
        self._store.patient = True
        try:
            # At twice the ttl, so that for a while an expired session can be told from one that never was.
            gone = self._store.sweep(self._clock() - 2 * self._store.ttl, _SWEPT_AT_ONCE)
            # However many there are, all are looked at within that time; and where all that were seen had to go, there
            # are probably more.
            return 0.0 if gone == _SWEPT_AT_ONCE else longest / (1 + self._store.count() // _SWEPT_AT_ONCE)
        except ServeError as error:
            _log.warning("expired sessions stay for now: %s", error)
            return longest

    def _apart(self, ops: list[SessionOperation]) -> list[SessionOperation]:
        """Split gathered pushes of which one was cancelled into single inputs, so that the others still run."""
        for op in ops:
            if type(op) is PushMany:
                op.future.started = True
                if op.future.cancelled:
                    op.as_pushes()
        return flattened(ops)

    def _wanted(self, op: SessionOperation) -> bool:
        """Begin with an operation, unless nobody waits for it any longer."""
        op.future.started = True
        if type(op) is PushChain:
            for push in op.pushes:
                push.future.started = True
            if op.cancelled:
                self._queue.put_back(op)
        return not op.future.cancelled

    def _give_up(self, ops: Sequence[SessionOperation], error: Exception) -> None:
        """Fail what has no result, and drop these sessions: only the store now knows their true state."""
        for op in self._open(ops):
            op.fail(error)
            self.set_back.forgotten(op.session, self._arena)  # a store that fails may come back older
            self._arena.drop(op.session)

    def _put_off(self, ops: Sequence[SessionOperation]) -> None:
        """Let what has no result come again: nothing was written."""
        for op in self._open(ops):
            self._delay(op, 0.0)

    def _open(self, ops: Sequence[SessionOperation]) -> list[SessionOperation]:
        """Return the operations that have no result."""
        for op in ops:
            if type(op) is PushMany and op.result is PENDING:
                op.as_pushes()
        return [op for op in flattened(ops) if op.result is PENDING]

    def _run(self, ops: list[SessionOperation]) -> None:
        now = self._clock()
        try:
            self._claims.begin_tick()
            batches: list[Batch] = []
            others: list[SessionOperation]
            if self._store.shared:
                others = flattened(ops, split=True)
            else:
                batches, others = self._split(ops, now)
            decisions: list[tuple[SessionOperation, Decision]] = []
            if others:
                inputs: list[tuple[Push, SessionEntry]] = []
                decisions = self._decide(others, self._claims.look_up(others), now, inputs)
                if inputs:
                    self._load(inputs)
                    batches += self._group([push for push, _ in inputs])
            began = time.perf_counter()
            results = self._batches.run(batches)
            self.model_seconds += time.perf_counter() - began
            self._commit(results, decisions, now)
        finally:
            self._claims.end_tick()

    # Splitting: inputs to sessions in the arena need no decision if they come next.

    def _split(self, ops: list[SessionOperation], now: float) -> tuple[list[Batch], list[SessionOperation]]:
        """Split operations into batches that can run at once, and those whose session has to be looked at first."""
        batches: list[Batch] = []
        others: list[SessionOperation] = []
        inputs: list[RowInput] = []
        table = self._arena.table
        for op in ops:
            if type(op) is PushMany:
                slots = self._arena.find(op.sessions)
                initial = table.initial[slots]
                if self._come_next(op.seqs, slots, now).all() and (initial == initial[0]).all():
                    table.used[slots] = self._number
                    batches.append(Batch(op, slots, bool(initial[0])))
                else:
                    inputs += op.as_pushes()
            elif isinstance(op, Push | PushChain):
                inputs.append(op)
            else:
                others.append(op)
        if inputs:
            good = self._can_run(inputs, now)
            batches += self._group([given for given, fits in zip(inputs, good, strict=True) if fits])
            others += [first_push(given) for given, fits in zip(inputs, good, strict=True) if not fits]
        return batches, others

    def _group(self, inputs: Sequence[RowInput]) -> list[Batch]:
        """Group inputs to sessions in the arena into batches."""
        if not inputs:
            return []
        slots = self._arena.find([given.session for given in inputs])
        self._arena.table.used[slots] = self._number
        return self._batches.group(inputs, slots, self._arena.table.initial[slots].tolist())

    def _can_run(self, inputs: Sequence[RowInput], now: float) -> list[bool]:
        """Return of each input whether it can run at once; a chain that cannot as a whole is cut to its first input."""
        slots = self._arena.find([given.session for given in inputs])
        good: list[bool] = self._come_next([first_push(given).seq for given in inputs], slots, now).tolist()
        for given, slot, fits in zip(inputs, slots.tolist(), good, strict=True):
            if type(given) is PushChain and not (fits and given.follows(int(self._arena.table.seq[slot]))):
                self._queue.put_back(given)
        return good

    def _come_next(self, seqs: Sequence[int | None] | None, slots: Ints, now: float) -> _Bools:
        """Return of each input whether it is the next one of a session that has a slot and has not expired."""
        table, good = self._arena.table, slots >= 0
        if seqs is not None and any(seqs):
            wanted = np.array([min(seq or 0, _LARGEST) for seq in seqs], np.int64)
            good &= (wanted == 0) | (wanted == table.seq[slots] + 1)
        if self._store.ttl is not None:
            good &= table.touched[slots] >= now - self._store.ttl
        return good

    # Looking up and deciding.

    def _decide(
        self,
        ops: list[SessionOperation],
        entries: dict[str, SessionEntry],
        now: float,
        inputs: list[tuple[Push, SessionEntry]],
    ) -> list[tuple[SessionOperation, Decision]]:
        """Answer what changes nothing, add to `inputs` what the model is to run, and return what changes sessions."""
        self._policy.begin_tick()
        decisions: list[tuple[SessionOperation, Decision]] = []
        for op in ops:
            if op.result is not PENDING:
                continue
            entry = entries.get(op.session)
            try:
                if entry is not None:
                    self.set_back.tell(op, entry)
                if type(op) is Push:
                    admitted = self._policy.admit(op, entry, now)
                    if isinstance(admitted, SessionEntry):
                        admitted.used = self._number
                        inputs.append((op, admitted))
                        continue
                    decision = admitted
                else:
                    decision = self._policy.decide(op, entry, now)
            except ServeError as error:
                op.result = error
                continue
            except Exception as error:  # whatever is wrong with one session, or what is kept of it, is its own
                _log.exception("an operation of session %r failed", op.session)
                op.result = ServeError(f"the engine failed on session {op.session!r}: {type(error).__name__}: {error}")
                continue
            if decision.change is None:
                op.result = decision.result
            else:
                decisions.append((op, decision))
        return decisions

    def _load(self, inputs: list[tuple[Push, SessionEntry]]) -> None:
        """Give a slot to each session that has none, and copy its state there; remove inputs whose state is damaged."""
        cold = [one for one in inputs if one[1].slot < 0]
        if not cold:
            return
        self._arena.make_room(len(cold), {push.session for push, _ in inputs})
        slots, rows = [], []
        for one in cold:
            push, entry = one
            try:
                row = None if entry.initial else self._policy.read_state(entry)
            except ServeError as error:
                push.result = error
                inputs.remove(one)
                continue
            self._arena.enter(entry)
            if row is not None:
                slots.append(entry.slot)
                rows.append(row)
            entry.state = None
        if slots:
            self._arena.scatter(as_slots(np.array(slots)), self._model.format.state(rows))

    # Committing.

    def _commit(
        self, results: list[BatchResult], decisions: list[tuple[SessionOperation, Decision]], now: float
    ) -> None:
        """Make everything durable in one transaction; only then move the arena on and set results."""
        changes = [decision.change for _, decision in decisions if decision.change is not None]
        if not results and not changes:
            return
        versions = self._store.advance([self._advance_of(result, now) for result in results], changes)
        begin = 0
        for result in results:
            self._move_on(result, versions[begin : begin + len(result.batch)], now)
            begin += len(result.batch)
        for (op, decision), change, version in zip(decisions, changes, versions[begin:], strict=True):
            self._arena.drop(change.session)
            if version is None:
                self._delay(op, 0.0)
            else:
                self._claims.changed([change.session])
                if decision.again:
                    self._delay(op, 0.0)
                else:
                    op.result = decision.result

    def _advance_of(self, result: BatchResult, now: float) -> Advance:
        table, at, inputs = self._arena.table, result.batch.at, result.shape.inputs
        return Advance(
            sessions=result.batch.sessions,
            tokens=table.token[at],
            seqs=table.seq[at] + inputs,
            steps=table.steps[at] + inputs * result.shape.steps,
            opened=table.opened[at],
            states=Blobs(self._model.format, result.after),
            answers=result.answers,
            inputs=inputs,
            touched=now,
            fingerprint=self._model.fingerprint,
        )

    def _move_on(self, result: BatchResult, versions: list[Any], now: float) -> None:
        """Write the committed states to their slots and set the results; run again what others changed meanwhile."""
        if None in versions:
            for given, version in zip(result.batch.rows, versions, strict=True):
                if version is None:
                    self._arena.drop(given.session)
                    self._delay(given, 0.0)
            kept = [row for row, version in enumerate(versions) if version is not None]
            if not kept:
                return
            result, versions = result.select(kept), [versions[row] for row in kept]
        at, shape, table = result.batch.at, result.shape, self._arena.table
        self._arena.scatter(at, result.after)
        table.advance(at, np.array(versions), inputs=shape.inputs, steps=shape.inputs * shape.steps, now=now)
        result.settle(table.seq[at])
        self._claims.changed(result.batch.sessions)

    def _delay(self, op: SessionOperation, seconds: float) -> None:
        """Let an operation come again in a later tick, unless it has done so for long enough."""
        if type(op) is PushChain and len(op) == 1:
            (op,) = op.pushes  # a chain that was cut is its first input, and has its result there
        now = time.monotonic()
        op.give_up_at = op.give_up_at or now + _PATIENCE
        if now > op.give_up_at:
            op.fail(
                Overloaded(
                    f"session {op.session!r} is being changed by another worker all the time, so this one gave up. "
                    f"Try again in a moment."
                )
            )
            return
        op.result = LATER
        self.delayed.append((op, seconds))
