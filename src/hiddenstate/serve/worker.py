"""The one thread that changes sessions: it looks up, runs, commits and answers, tick after tick."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence

import numpy as np
import torch

from ..errors import Overloaded, ServeError
from .arena import Slab
from .batch import Batch, Ran
from .batching import Batching
from .facts import Entry
from .inputs import Chain, Many, Push, singly
from .model import Served
from .parting import Parting
from .policy import Deciding, Plan
from .queue import Line
from .session_operations import LATER, PENDING, Op, Ticket, tell
from .stats import Stats
from .stores import Advance, Blobs, Store
from .tick import Finding

_log = logging.getLogger(__name__)
_SWEPT_AT_ONCE = 1000
_PATIENCE = 30.0  # seconds after which an operation that others keep in the way of gives up
_QUICK = 0.01  # seconds
_LOOK_AGAIN = 0.05  # seconds after which inputs are seen to whose own event loop has ended meanwhile


def _in_some_mode() -> bool:
    """Say whether the calling thread is in a mode of its own that would change what the model computes."""
    return (
        torch.is_inference_mode_enabled()
        or torch.is_autocast_enabled("cpu")
        or torch.is_autocast_enabled("cuda")
        or torch._C._len_torch_function_stack() > 0
        or torch._C._len_torch_dispatch_stack() > 0
    )


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
        self._batch, self._clock = min(batch, slab.count), clock
        gather = slab.view if served.tidy else slab.gather
        self._batching = Batching(served, gather, keep=store.replay > 0, put_back=line.put_back)
        self._deciding = Deciding(served, store, slab, limit=limit, answered=self._batching.answered)
        self._sweep_every = None if store.ttl is None else min(30.0, max(0.05, store.ttl / 4))
        self._finding = Finding(served, store, slab, wait=self._wait)
        self._claimed = self._finding.claimed
        self._parting = Parting(slab, store, self._batching, put_back=line.put_back)
        self._number = 0  # of the tick
        self._later: list[tuple[Op, float]] = []  # what is to come again, once this tick is over
        self._turn = threading.Lock()  # held by whichever thread is within a tick
        self._seconds = 0.0  # that a tick takes, lately
        self._pass_on: Callable[[Op], None] = lambda op: line.call()  # what is left after a tick of the thread's own
        # A new thread would compute with as many threads as there are cores, whatever this one was told.
        threads = torch.get_num_threads()
        self._thread = threading.Thread(target=self._loop, args=(threads,), name="hiddenstate-engine", daemon=True)

    def start(self, pass_on: Callable[[Op], None]) -> None:
        """Begin; `pass_on` decides who sees to what is left after a tick of the thread's own."""
        self._pass_on = pass_on
        self._thread.start()

    def join(self) -> None:
        """Wait until the line is closed and everything in it is done."""
        self._thread.join()

    @property
    def quick(self) -> bool:
        """Whether a tick is over so soon that an event loop may run it itself; never with a store across a network."""
        return self._seconds < _QUICK and not self._store.shared

    def tick_now(self) -> bool:
        """Run a tick in the calling thread; False when it cannot: then somebody has to call the worker's own."""
        if _in_some_mode() or not self._turn.acquire(blocking=False):
            return False
        try:
            ops = self._line.take_now(self._batch)
            if ops:
                self._tick(ops)
        finally:
            self._turn.release()
        return True

    def _loop(self, threads: int) -> None:
        torch.set_num_threads(threads)
        swept = time.monotonic()
        while True:
            ops = self._line.take(self._batch, timeout=_LOOK_AGAIN)
            if ops is None:
                return
            late = self._sweep_every is not None and time.monotonic() - swept >= self._sweep_every
            if ops or late:  # never for nothing: whoever finds the turn taken has to wait for this thread
                with self._turn:
                    if ops:
                        self._tick_on(ops)
                    if late:
                        swept = time.monotonic()
                        self._sweep()
            if (first := self._line.first) is not None:
                self._pass_on(first)

    def _tick_on(self, ops: list[Op]) -> None:
        try:
            self._tick(ops)
        except BaseException:  # a model may well call sys.exit: nobody else is to wait forever for that
            _log.exception("a tick was interrupted")

    def _sweep(self) -> None:
        assert self._store.ttl is not None
        try:
            # Twice its time, so that for a while a session that is gone is told from one that never was.
            self._store.sweep(self._clock() - 2 * self._store.ttl, _SWEPT_AT_ONCE)
        except ServeError as error:
            _log.warning("expired sessions stay for now: %s", error)

    def _tick(self, ops: list[Op]) -> None:
        began, worked = time.perf_counter(), time.thread_time()
        self._number += 1
        try:
            self._serve([op for op in ops if self._wanted(op)])
        except ServeError as error:
            self._give_up(ops, error)
        except Exception as error:  # a mistake of ours must not end the thread that all callers wait for
            _log.exception("a tick failed")
            self._give_up(ops, ServeError(f"the engine failed within a tick: {type(error).__name__}: {error}"))
        except BaseException:
            self._give_up(ops, ServeError("the engine was interrupted within a tick. Repeat the input with its seq."))
            raise
        finally:
            self._answer(ops, began)
            # Of the processor, not of the clock: waiting for the interpreter's lock says nothing about the tick.
            self._seconds += 0.2 * (time.thread_time() - worked - self._seconds)

    def _answer(self, ops: list[Op], began: float) -> None:
        done = [op for op in singly(ops) if op.result is not LATER]
        self._line.done(done)
        later, self._later = self._later, []
        for op, seconds in later:  # now, and not before: from here on another thread may take it
            self._line.delay(op, seconds)
        tickets: list[Ticket] = []
        for op in done:
            op.settle(tickets)
        self.stats.tick(done, tickets, began)
        tell(tickets)

    def _wanted(self, op: Op) -> bool:
        if type(op) is Chain and op.cancelled:
            self._line.put_back(op)
        return not op.ticket.cancelled

    def _give_up(self, ops: Sequence[Op], error: Exception) -> None:
        """Fail what has no answer; the store alone now knows how these sessions are."""
        for op in ops:
            if type(op) is Many and op.result is PENDING:
                op.apart()
        for op in singly(ops):
            if op.result is PENDING:
                op.fail(error)
                self._slab.drop(op.session)

    def _serve(self, ops: list[Op]) -> None:
        now = self._clock()
        batches: list[Batch]
        self._claimed.clear()
        self._deciding.begin()
        try:
            if self._store.others_wrote():
                self._slab.clear()
            if self._store.shared:
                batches, others = [], singly(ops, apart=True)
            else:
                batches, others = self._parting.part(ops, now, self._number)
            inputs: list[tuple[Push, Entry]] = []
            plans = self._decide(others, self._finding.look_up(others), now, inputs) if others else []
            if inputs:
                self._finding.warm(inputs)
                batches += self._parting.batches([push for push, _ in inputs], self._number)
            self._commit(self._batching.run(batches), plans, now)
        finally:
            if self._claimed:
                self._store.release(list(self._claimed.items()))

    def _decide(
        self, ops: list[Op], entries: dict[str, Entry], now: float, inputs: list[tuple[Push, Entry]]
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

    def _commit(self, ran: list[Ran], plans: list[tuple[Op, Plan]], now: float) -> None:
        """Make everything durable in one transaction; only then move slots on and answer."""
        changes = [plan.change for _, plan in plans if plan.change is not None]
        if not ran and not changes:
            return
        versions = self._store.advance([self._moved(group, now) for group in ran], changes)
        begin = 0
        for group in ran:
            self._advance(group, versions[begin : begin + len(group.batch)], now)
            begin += len(group.batch)
        for (op, plan), version in zip(plans, versions[begin:], strict=True):
            self._slab.drop(op.session)
            if version is None:
                self._wait(op, 0.0)
            else:
                self._claimed.pop(op.session, None)
                op.result = plan.result

    def _moved(self, group: Ran, now: float) -> Advance:
        facts, at = self._slab.facts, group.batch.at
        return Advance(
            sessions=group.batch.sessions,
            tokens=facts.token[at],
            seqs=facts.seq[at] + group.kind.inputs,
            steps=facts.steps[at] + group.kind.inputs * group.kind.steps,
            opened=facts.opened[at],
            states=Blobs(self._served.format, group.after),
            answers=group.answers,
            inputs=group.kind.inputs,
            touched=now,
            fingerprint=self._served.fingerprint,
        )

    def _advance(self, group: Ran, versions: list[int | None], now: float) -> None:
        if None in versions:
            # Somebody else has changed these sessions meanwhile: what was computed here never was.
            for unit, version in zip(group.batch.apart, versions, strict=True):
                if version is None:
                    self._slab.drop(unit.session)
                    self._wait(unit, 0.0)
            kept = [row for row, version in enumerate(versions) if version is not None]
            if not kept:
                return
            group, versions = group.select(kept), [version for version in versions if version is not None]
        at, kind, facts = group.batch.at, group.kind, self._slab.facts
        self._slab.scatter(at, group.after)
        facts.advance(at, np.array(versions), inputs=kind.inputs, steps=kind.inputs * kind.steps, now=now)
        group.settle(facts.seq[at])
        for session in self._claimed and group.batch.sessions:
            self._claimed.pop(session, None)

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
        self._later.append((op, seconds))
