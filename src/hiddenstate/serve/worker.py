"""The one thread that changes sessions: it looks up, runs, commits and answers, tick after tick."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence

from ..errors import Overloaded, ServeError
from .batching import Batching, Input, Ran
from .deciding import Deciding, Plan, read_state
from .line import Line
from .ops import LATER, PENDING, Export, Fork, Info, Names, Op, Output, Push, tell
from .served import Served
from .slab import Entry, Slab
from .stats import Stats
from .stores import Busy, Change, Claim, Row, Store

_log = logging.getLogger(__name__)
_LOOK_ONLY = (Info, Export, Fork)  # of the session they are asked of, these change nothing
_SWEPT_AT_ONCE = 1000
_RETRY = 0.01  # seconds until another worker's lease is looked at again
_PATIENCE = 30.0  # seconds after which an operation that others keep in the way of gives up
_tuple = tuple.__new__  # makes a named tuple in half the time, which counts with hundreds in a tick


class Worker:
    """Does what stands in line. Since it alone touches slots, rows and the model, nothing in them can race."""

    def __init__(
        self,
        served: Served,
        store: Store,
        line: Line,
        *,
        slab: Slab,
        batch: int,
        limit: int,
        clock: Callable[[], float],
    ) -> None:
        """Serve up to `batch` operations in a tick, and keep up to `limit` sessions in the store."""
        self.stats = Stats()
        self._served, self._store, self._line, self._slab = served, store, line, slab
        self._batch, self._clock = min(batch, slab.slots), clock
        self._batching = Batching(served, slab.gather, sealed=store.sealed, keep=store.replay > 0)
        self._deciding = Deciding(served, store, slab, limit=limit, answered=self._batching.answered)
        self._sweep_every = None if store.ttl is None else min(30.0, max(0.05, store.ttl / 4))
        self._claimed: dict[str, int] = {}  # what this tick has claimed and not yet changed: session -> token
        self._number = 0  # of the tick
        self._thread = threading.Thread(target=self._loop, name="hiddenstate-engine", daemon=True)
        self._thread.start()

    def join(self) -> None:
        """Wait until the line is closed and everything in it is done."""
        self._thread.join()

    def _loop(self) -> None:
        swept = time.monotonic()
        while True:
            ops = self._line.take(self._batch, timeout=self._sweep_every)
            if ops is None:
                return
            if ops:
                self._tick(ops)
            if self._sweep_every is not None and time.monotonic() - swept >= self._sweep_every:
                swept = time.monotonic()
                self._sweep()

    def _sweep(self) -> None:
        assert self._store.ttl is not None
        try:
            # Twice its time, so that for a while a session that is gone is told from one that never was.
            self._store.sweep(self._clock() - 2 * self._store.ttl, _SWEPT_AT_ONCE)
        except ServeError as error:
            _log.warning("expired sessions stay for now: %s", error)

    def _tick(self, ops: list[Op]) -> None:
        began = time.perf_counter()
        self._number += 1
        try:
            self._serve([op for op in ops if not op.ticket.cancelled])
        except ServeError as error:
            self._give_up(ops, error)
        except Exception as error:  # a mistake of ours must not end the thread that all callers wait for
            _log.exception("a tick failed")
            self._give_up(ops, ServeError(f"the engine failed within a tick: {type(error).__name__}: {error}"))
        done = [op for op in ops if op.result is not LATER]
        self._line.done(done)
        tickets = [op.ticket for op in done if op.ticket.put(op.place, op.result)]
        self.stats.tick(ops, tickets, began)
        tell(tickets)

    def _give_up(self, ops: Sequence[Op], error: Exception) -> None:
        """Fail what has no answer; the store alone now knows how these sessions are."""
        for op in ops:
            if op.result is PENDING:
                op.result = error
                self._slab.drop(op.session)

    def _serve(self, ops: list[Op]) -> None:
        now = self._clock()
        self._claimed.clear()
        self._deciding.begin()
        try:
            if self._store.others_wrote():
                self._slab.clear()
            inputs, others = self._at_hand(ops, now)
            plans = self._decide(others, self._look_up(others), now, inputs) if others else []
            self._warm(inputs)
            self._commit(self._batching.run(inputs), plans, now)
        finally:
            if self._claimed:
                self._store.release(list(self._claimed.items()))

    def _at_hand(self, ops: list[Op], now: float) -> tuple[list[Input], list[Op]]:
        """Part inputs that come next in a session whose state is in its slot from everything else."""
        if self._store.shared:
            return [], ops
        inputs: list[Input] = []
        others: list[Op] = []
        entries, number = self._slab.entries, self._number
        oldest = -1.0 if self._store.ttl is None else now - self._store.ttl
        for op in ops:
            entry = entries.get(op.session)
            if (
                entry is not None
                and type(op) is Push
                and (op.seq is None or op.seq == entry.seq + 1)
                and entry.touched >= oldest
            ):
                entry.used = number
                inputs.append((op, entry))
            else:
                others.append(op)
        return inputs, others

    def _look_up(self, ops: list[Op]) -> dict[str, Entry]:
        """Return what is known of each session: from its slot, or else from the store."""
        entries: dict[str, Entry] = {}
        wanted: list[tuple[Op, Entry | None]] = []
        shared = self._store.shared
        for op in ops:
            if type(op) is Names:
                continue
            entry = self._slab.entries.get(op.session)
            if entry is not None and not shared:
                entries[op.session] = entry
            elif shared and isinstance(op, _LOOK_ONLY):
                row = self._store.read(op.session)
                if row is not None:
                    entries[op.session] = _entry(op.session, Claim(-1, -1, row))
            else:
                wanted.append((op, entry))
        if wanted:
            claims = self._store.claim([(op.session, -1 if e is None else e.version) for op, e in wanted])
            for (op, entry), claim in zip(wanted, claims, strict=True):
                if isinstance(claim, Busy):
                    self._wait(op, min(claim.seconds, _RETRY))
                elif claim is None:
                    self._slab.drop(op.session)
                else:
                    entries[op.session] = self._claim(op.session, claim, entry)
        return entries

    def _claim(self, session: str, claim: Claim, entry: Entry | None) -> Entry:
        if self._store.shared:
            self._claimed[session] = claim.token
        if claim.row is None:
            assert entry is not None
            entry.token = claim.token
            return entry
        self._slab.drop(session)
        return _entry(session, claim)

    def _decide(
        self, ops: list[Op], entries: dict[str, Entry], now: float, inputs: list[Input]
    ) -> list[tuple[Op, Plan]]:
        """Answer what can be answered, add to the inputs those to be applied, and return what changes sessions."""
        plans: list[tuple[Op, Plan]] = []
        for op in ops:
            if op.result is not PENDING:
                continue
            try:
                if type(op) is Push:
                    plan = self._deciding.admit(op, entries.get(op.session), now)
                else:
                    plan = self._deciding.plan(op, entries.get(op.session), now)
            except ServeError as error:
                op.result = error
                continue
            if isinstance(plan, Entry):
                plan.used = self._number
                inputs.append((op, plan))  # type: ignore[arg-type]
            elif plan.change is None:
                op.result = plan.result
            else:
                plans.append((op, plan))
        return plans

    def _warm(self, inputs: list[Input]) -> None:
        """Give each session a slot, and bring the states of those that had none into theirs."""
        cold = [one for one in inputs if one[1].slot < 0]
        if not cold:
            return
        self._slab.make_room(len(cold), {push.session for push, _ in inputs})
        slots, rows = [], []
        for one in cold:
            push, entry = one
            try:
                row = None if entry.anew else read_state(self._served, self._store, entry)
            except ServeError as error:
                push.result = error
                inputs.remove(one)
                continue
            self._slab.enter(entry)
            if row is not None:
                slots.append(entry.slot)
                rows.append(row)
            entry.state = None
        if slots:
            self._slab.scatter(slots, self._served.format.state(rows))

    def _commit(self, ran: list[Ran], plans: list[tuple[Op, Plan]], now: float) -> None:
        """Make everything durable in one transaction; only then move slots on and answer."""
        changes: list[Change] = []
        kind, fingerprint, sealed = self._served.format, self._served.fingerprint, self._store.sealed
        for group in ran:
            rows = kind.rows(group.after)
            if sealed:
                rows = [kind.seal(row) for row in rows]
            for (push, entry), state, answer in zip(group.inputs, rows, group.answers, strict=True):
                row = _tuple(Row, (entry.seq + 1, entry.steps + push.steps, entry.opened, now, fingerprint, state))
                changes.append(_tuple(Change, (push.session, entry.token, row, answer, False)))
        changes.extend(plan.change for _, plan in plans if plan.change is not None)
        if not changes:
            return
        versions = self._store.commit(changes)
        begin = 0
        for group in ran:
            self._advance(group, versions[begin : begin + len(group.inputs)], now)
            begin += len(group.inputs)
        for (op, plan), version in zip(plans, versions[begin:], strict=True):
            self._slab.drop(op.session)
            if version is None:
                self._wait(op, 0.0)
            else:
                self._claimed.pop(op.session, None)
                op.result = plan.result

    def _advance(self, group: Ran, versions: list[int | None], now: float) -> None:
        if None in versions:
            kept = [row for row, version in enumerate(versions) if version is not None]
            self._slab.scatter([group.inputs[row][1].slot for row in kept], group.after.select(kept))
        else:
            self._slab.scatter([entry.slot for _, entry in group.inputs], group.after)
        claimed, leaves = self._claimed, group.leaves
        for row, ((push, entry), version) in enumerate(zip(group.inputs, versions, strict=True)):
            if version is None:
                # Somebody else has changed the session meanwhile: what was computed here never was.
                self._slab.drop(push.session)
                self._wait(push, 0.0)
                continue
            entry.token = entry.version = version
            entry.seq = push.seq = entry.seq + 1
            entry.steps += push.steps
            entry.touched = now
            entry.anew = False
            push.result = _tuple(Output, (leaves, row))
            if claimed:
                claimed.pop(push.session, None)

    def _wait(self, op: Op, seconds: float) -> None:
        """Let an operation come again in a later tick, unless it has done so for long enough."""
        now = time.monotonic()
        op.patience = op.patience or now + _PATIENCE
        if now > op.patience:
            op.result = Overloaded(
                f"session {op.session!r} is being changed by another worker all the time, so this one gave up. "
                f"Try again in a moment."
            )
            return
        op.result = LATER
        self._line.delay(op, seconds)


def _entry(session: str, claim: Claim) -> Entry:
    assert claim.row is not None
    entry = Entry(session, claim.token, claim.version)
    entry.seq, entry.steps, entry.opened, entry.touched, entry.fingerprint, entry.state = claim.row
    entry.anew = entry.state is None
    return entry
