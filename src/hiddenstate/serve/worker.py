"""Who runs a tick: the worker's own thread, the thread that waits for the answer, or an event loop.

Whoever runs it takes operations from the queue, has `TickRunner` run them, and delivers the results. A lock makes sure
that there is one tick at a time. What was run is counted.
"""

from __future__ import annotations

import asyncio
import logging
import math
import threading
import time
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch

from .futures import AsyncResultFuture, ResultFuture, notify_all
from .pushes import GatheredInputs
from .queue import OperationQueue
from .session_operations import LATER, Export, Import, ListNames, Push, PushChain, PushMany, SessionOperation, flattened
from .stores import Store
from .tick import TickRunner

_T = TypeVar("_T")
_log = logging.getLogger(__name__)
_QUICK = 0.01  # seconds
_BRIEF = 0.0005  # seconds within the store
_LONG = 8  # steps in one input, from which on the time of a tick tells what a step takes
_UPKEEP = 1.0  # seconds between two looks at what the store can do when nobody waits
_KEPT = 1024  # ticks and answers that means and quantiles are taken over
_LOOK_AGAIN = 0.05  # seconds after which operations are taken over from an event loop that has ended meanwhile


class Worker:
    """Sees to it that what is in the queue is run, by the thread for which this is quickest.

    Handing a short tick to another thread costs more than the tick, since both wait for the interpreter's lock: a
    caller that waits, or an event loop if ticks are short, runs it itself where it can.
    """

    def __init__(
        self, ticks: TickRunner, queue: OperationQueue, store: Store, *, max_batch: int, max_wait: float
    ) -> None:
        """Take up to `max_batch` operations for a tick; event loops let others join it for `max_wait` seconds."""
        self.counter = TickCounter()
        self.gathered: GatheredInputs | None = None  # of inputs that coroutines give one by one
        self._ticks, self._queue, self._store = ticks, queue, store
        self._max_batch, self._max_wait = max_batch, max_wait
        self._shared, self._sweeps = store.shared, store.ttl is not None
        self._turn = threading.Lock()  # held by whichever thread is within a tick
        self._seconds = math.inf  # that a tick takes, as a moving average; before the first, nobody knows
        self._in_store = 0.0  # seconds of it within the store, as a moving average
        self._step_seconds = _QUICK / _LONG  # that a step of a long input takes, as a moving average
        self._slow: set[ResultFuture] = set()  # of operations that may take long, and are not for an event loop
        self._driver: asyncio.AbstractEventLoop | None = None  # the event loop that is about to run a tick
        self._seen = 0  # operations in the queue when that loop last looked
        self._since = 0.0  # when it first looked
        # A new thread would compute with as many threads as there are cores, whatever this one was told.
        threads = torch.get_num_threads()
        self._thread = threading.Thread(target=self._loop, args=(threads,), name="hiddenstate-engine", daemon=True)

    def start(self) -> None:
        """Start the worker's own thread."""
        self._thread.start()

    def join(self) -> None:
        """Wait until the queue is closed and everything in it is done."""
        self._thread.join()

    def submit(self, ops: Sequence[SessionOperation]) -> None:
        """Queue operations of a thread that will wait for them, and run their tick here unless one is under way."""
        if self.gathered is not None:
            self.gathered.flush()  # what came before these from the same thread
        self._queue.add(ops, notify=False)
        if _in_a_torch_mode() or (self._tick_here(join=True) and self._queue.first is not None):
            self._queue.notify()
        # Else another thread is within a tick, and sees to what has come meanwhile when it is done.

    def between_ticks(self, work: Callable[[], _T]) -> _T:
        """Do something while no tick is under way, and return what it returns."""
        try:
            with self._turn:
                self._store.patient = True
                return work()
        finally:
            self._queue.notify()  # of what has come meanwhile

    def submit_async(self, ops: Sequence[SessionOperation]) -> None:
        """Queue operations of a coroutine; if ticks are short, the running event loop will run theirs itself."""
        if self.gathered is not None:
            self.gathered.flush()
        slow = [op.future for op in ops if self._may_take_long(op)]
        if slow:
            self._slow.update(slow)
        if self.quick:
            self._queue.append(ops)
            self._call_driver(asyncio.get_running_loop())
        else:
            self._queue.add(ops)

    def check_store(self) -> None:
        """Raise `StoreFailed` where the store cannot be read or written now."""
        with self._turn:
            self._store.patient = True
            self._store.check()

    @property
    def quick(self) -> bool:
        """Whether a tick is so short that an event loop may run it itself; never with a store across a network.

        Where the store takes its time, the event loop reads the next inputs meanwhile, and sends answers: a tick's
        commit overlaps with what comes before and after the next one.
        """
        return self._seconds < _QUICK and self._in_store < _BRIEF and not self._slow and not self._shared

    def _may_take_long(self, op: SessionOperation) -> bool:
        if type(op) is Push:
            return op.steps > _LONG and op.steps * self._step_seconds > _QUICK
        return isinstance(op, ListNames | Export | Import)

    # In an event loop.

    def _call_driver(self, loop: asyncio.AbstractEventLoop) -> None:
        if self._driver is not loop:
            self._driver = loop
            self._seen, self._since = 0, time.monotonic()
            loop.call_soon(self._drive, loop)

    def _drive(self, loop: asyncio.AbstractEventLoop) -> None:
        size = len(self._queue)
        # As long as more come in every turn of the loop, let them: a tick costs much the same for one as for many.
        if size > self._seen and time.monotonic() - self._since < self._max_wait:
            self._seen = size
            loop.call_soon(self._drive, loop)
            return
        self._driver = None  # before the tick: operations that come after it need another call
        if not self.quick or _in_a_torch_mode() or not self._tick_here(patient=False):
            self._queue.notify()
        elif self._queue.first is not None:
            self._call_driver(loop)

    # In the worker's own thread.

    def _loop(self, threads: int) -> None:
        torch.set_num_threads(threads)
        sweep_at, upkeep_at = time.monotonic(), time.monotonic() + _UPKEEP
        while True:
            ops = self._queue.take(self._max_batch, timeout=_LOOK_AGAIN)
            if ops is None:
                return
            now = time.monotonic()
            sweep, upkeep = self._sweeps and now >= sweep_at, now >= upkeep_at
            if ops or sweep or upkeep:  # not otherwise: a caller that finds the lock held has to wait for this thread
                with self._turn:
                    if ops:
                        try:
                            self._tick(ops)
                        except BaseException:  # a model may well call sys.exit: the other callers still need answers
                            _log.exception("a tick was interrupted")
                    if sweep:
                        sweep_at = now + self._ticks.sweep()
                    if upkeep:
                        upkeep_at = now + _UPKEEP
                        self._store.patient = True
                        self._store.upkeep()
            if (first := self._queue.first) is not None:
                self._hand_on(first)

    def _hand_on(self, op: SessionOperation) -> None:
        """Leave what is still in the queue, `op` first, to the event loop it came from, or keep it for this thread."""
        if self.quick and isinstance(op.future, AsyncResultFuture):
            try:
                op.future.loop.call_soon_threadsafe(self._drive, op.future.loop)
            except RuntimeError:  # it is closed
                self._queue.notify()
        else:
            self._queue.notify()

    # In any of them.

    def _tick_here(self, *, patient: bool = True, join: bool = False) -> bool:
        """Run a tick in the calling thread, unless one is under way; with `join`, let others join it."""
        if not self._turn.acquire(blocking=False):
            return False
        try:
            ops = self._queue.take_now(self._max_batch, join=join)
            if ops:
                self._tick(ops, patient=patient)
        finally:
            self._turn.release()
        return True

    def _tick(self, ops: list[SessionOperation], *, patient: bool = True) -> None:
        began, worked = time.perf_counter(), time.thread_time()
        waited, before = self._store.waited, (self._ticks.model_seconds, self._store.seconds)
        try:
            self._ticks.run(ops, patient=patient)
        finally:
            model, store = self._ticks.model_seconds - before[0], self._store.seconds - before[1]
            self._in_store += 0.2 * (store - self._in_store)
            self._deliver(ops, began, model, store)
            # Processor time, and what the store waited for: how long the thread waited for the interpreter's lock says
            # nothing about the tick.
            self._learn(ops, time.thread_time() - worked + self._store.waited - waited)

    def _learn(self, ops: list[SessionOperation], seconds: float) -> None:
        """Note how long a tick took, and what a step takes where there was a long input in it."""
        self._seconds = seconds if self._seconds == math.inf else self._seconds + 0.2 * (seconds - self._seconds)
        longest = max([op.steps if isinstance(op, Push | PushMany) else 0 for op in ops])
        if longest > _LONG:
            self._step_seconds += 0.2 * (seconds / longest - self._step_seconds)

    def _deliver(self, ops: list[SessionOperation], began: float, model: float, store: float) -> None:
        done = [op for op in flattened(ops) if op.result is not LATER]
        self._queue.done(done)
        delayed, self._ticks.delayed = self._ticks.delayed, []
        for op, seconds in delayed:  # not before the tick is over: from here on another thread may take it
            self._queue.delay(op, seconds)
        complete: list[ResultFuture] = []
        for op in done:
            op.deliver(complete)
        self._slow.difference_update(complete)
        self.counter.set_back = self._ticks.set_back.count
        self.counter.count(done, complete, began, model=model, store=store)
        notify_all(complete)


def _in_a_torch_mode() -> bool:
    """Return whether the calling thread is in a mode of torch that would change what the model computes."""
    return (
        torch.is_inference_mode_enabled()
        or torch.is_autocast_enabled("cpu")
        or torch.is_autocast_enabled("cuda")
        or torch._C._len_torch_function_stack() > 0
        or torch._C._len_torch_dispatch_stack() > 0
    )


BOUNDS = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)


@dataclass(frozen=True, slots=True)
class Histogram:
    """How often something took how long: up to each of the `BOUNDS` in seconds, and at last longer than all."""

    counts: tuple[int, ...] = (0,) * (len(BOUNDS) + 1)
    seconds: float = 0.0  # in all


class DurationCounter:
    """Counts durations for a histogram."""

    def __init__(self) -> None:
        """Start at zero."""
        self._counts, self._seconds = [0] * (len(BOUNDS) + 1), 0.0

    def add(self, seconds: float, count: int = 1) -> None:
        """Count one duration, as often as it was met."""
        self._counts[bisect_left(BOUNDS, seconds)] += count
        self._seconds += count * seconds

    def histogram(self) -> Histogram:
        """Return what was counted."""
        return Histogram(tuple(self._counts), self._seconds)


@dataclass(frozen=True, slots=True)
class EngineStats:
    """Totals since the start, and the last thousand or so ticks."""

    seconds: float  # since the start
    ticks: int
    inputs: int  # applied or answered again
    steps: int
    failures: int  # operations that were answered by an error
    set_back: int  # sessions that were found older in the store than they had been here
    batch: float  # mean number of operations in a tick, lately
    tick_seconds: float  # mean, lately
    latency_p50: float  # seconds from call to answer, lately
    latency_p99: float
    waiting: Histogram  # of callers, from their call to the beginning of the tick that answered them
    answering: Histogram  # of callers, from their call to its answer
    model: Histogram  # of ticks, within calls of the model
    store: Histogram  # of ticks, within the store


class TickCounter:
    """Counts ticks and what was in them; read from any thread."""

    def __init__(self) -> None:
        """Start at zero."""
        self._lock = threading.Lock()
        self._began = time.monotonic()
        self._ticks = self._inputs = self._steps = self._failures = 0
        self.set_back = 0
        self._lately: deque[tuple[int, float]] = deque(maxlen=_KEPT)  # operations, seconds
        self._latencies: deque[float] = deque(maxlen=_KEPT)
        self._waiting, self._answering, self._model, self._store = (DurationCounter() for _ in range(4))

    def count(
        self,
        ops: Sequence[SessionOperation],
        complete: Sequence[ResultFuture],
        began: float,
        *,
        model: float = 0.0,
        store: float = 0.0,
    ) -> None:
        """Count one tick: its operations, the futures that it completed, its seconds in the model and in the store."""
        now = time.perf_counter()
        single = [op for op in ops if not isinstance(op, PushChain | PushMany)]
        chained = [push for op in ops if isinstance(op, PushChain) for push in op.pushes]
        many = [op for op in ops if isinstance(op, PushMany)]
        good = [op for op in [*single, *chained] if not isinstance(op.result, Exception)]
        failed = len(single) + len(chained) - len(good)
        lengths = [op.steps for op in good if type(op) is Push]
        together = sum([len(op) for op in many])
        with self._lock:
            self._ticks += 1
            self._inputs += len(lengths) + together
            self._steps += sum(lengths) + sum([op.steps * len(op) for op in many])
            self._failures += failed
            self._lately.append((len(single) + len(chained) + together, now - began))
            for future in complete:
                latency, callers = now - future.began, future.callers
                self._latencies.extend([latency] * callers)
                self._answering.add(latency, callers)
                self._waiting.add(max(0.0, began - future.began), callers)
            self._model.add(model)
            self._store.add(store)

    def snapshot(self) -> EngineStats:
        """Return the current numbers."""
        with self._lock:
            lately, latencies = list(self._lately), sorted(self._latencies)
            totals = (self._ticks, self._inputs, self._steps, self._failures, self.set_back)
            times = [held.histogram() for held in (self._waiting, self._answering, self._model, self._store)]
        batch, seconds = (
            sum(column) / max(1, len(lately)) for column in (zip(*lately, strict=True) if lately else ((), ()))
        )
        p50, p99 = (latencies[int(share * (len(latencies) - 1))] if latencies else 0.0 for share in (0.5, 0.99))
        return EngineStats(time.monotonic() - self._began, *totals, batch, seconds, p50, p99, *times)
