"""Who runs a tick: the worker's own thread, the thread that waits for the answer, or an event loop.

Whoever runs it takes operations from the queue, has `TickRunner` run them, and delivers the results. A lock makes sure
that there is one tick at a time.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Sequence

import torch

from .queue import OperationQueue
from .session_operations import LATER, AsyncResultFuture, ResultFuture, SessionOperation, flattened, notify_all
from .stats import TickCounter
from .stores import Store
from .tick import TickRunner

_log = logging.getLogger(__name__)
_QUICK = 0.01  # seconds
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
        self._ticks, self._queue = ticks, queue
        self._max_batch, self._max_wait = max_batch, max_wait
        self._shared = store.shared
        self._sweep_every = None if store.ttl is None else min(30.0, max(0.05, store.ttl / 4))
        self._turn = threading.Lock()  # held by whichever thread is within a tick
        self._seconds = 0.0  # processor time of a tick, as a moving average
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
        self._queue.add(ops, notify=False)
        if not self._tick_here() or self._queue.first is not None:
            self._queue.notify()

    def submit_async(self, ops: Sequence[SessionOperation]) -> None:
        """Queue operations of a coroutine; if ticks are short, the running event loop will run theirs itself."""
        quick = self._quick
        self._queue.add(ops, notify=not quick)
        if quick:
            self._call_driver(asyncio.get_running_loop())

    @property
    def _quick(self) -> bool:
        """Whether a tick is so short that an event loop may run it itself; never with a store across a network."""
        return self._seconds < _QUICK and not self._shared

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
        if not self._tick_here():
            self._queue.notify()
        elif self._queue.first is not None:
            self._call_driver(loop)

    # In the worker's own thread.

    def _loop(self, threads: int) -> None:
        torch.set_num_threads(threads)
        swept = time.monotonic()
        while True:
            ops = self._queue.take(self._max_batch, timeout=_LOOK_AGAIN)
            if ops is None:
                return
            late = self._sweep_every is not None and time.monotonic() - swept >= self._sweep_every
            if ops or late:  # not otherwise: a caller that finds the lock held has to wait for this thread
                with self._turn:
                    if ops:
                        try:
                            self._tick(ops)
                        except BaseException:  # a model may well call sys.exit: the other callers still need answers
                            _log.exception("a tick was interrupted")
                    if late:
                        swept = time.monotonic()
                        self._ticks.sweep()
            if (first := self._queue.first) is not None:
                self._hand_on(first)

    def _hand_on(self, op: SessionOperation) -> None:
        """Leave what is still in the queue, `op` first, to the event loop it came from, or keep it for this thread."""
        if self._quick and isinstance(op.future, AsyncResultFuture):
            try:
                op.future.loop.call_soon_threadsafe(self._drive, op.future.loop)
            except RuntimeError:  # it is closed
                self._queue.notify()
        else:
            self._queue.notify()

    # In any of them.

    def _tick_here(self) -> bool:
        """Run a tick in the calling thread; False where that is impossible, so that the worker's own thread must."""
        if _in_a_torch_mode() or not self._turn.acquire(blocking=False):
            return False
        try:
            ops = self._queue.take_now(self._max_batch)
            if ops:
                self._tick(ops)
        finally:
            self._turn.release()
        return True

    def _tick(self, ops: list[SessionOperation]) -> None:
        began, worked = time.perf_counter(), time.thread_time()
        try:
            self._ticks.run(ops)
        finally:
            self._deliver(ops, began)
            # Processor time: how long the thread waited for the interpreter's lock says nothing about the tick.
            self._seconds += 0.2 * (time.thread_time() - worked - self._seconds)

    def _deliver(self, ops: list[SessionOperation], began: float) -> None:
        done = [op for op in flattened(ops) if op.result is not LATER]
        self._queue.done(done)
        delayed, self._ticks.delayed = self._ticks.delayed, []
        for op, seconds in delayed:  # not before the tick is over: from here on another thread may take it
            self._queue.delay(op, seconds)
        complete: list[ResultFuture] = []
        for op in done:
            op.deliver(complete)
        self.counter.count(done, complete, began)
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
