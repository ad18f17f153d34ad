"""The futures on which callers wait for the results of their operations: in a thread, or in a coroutine."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..errors import DeadlineExceeded


class ResultFuture:
    """The results of one or more operations, for a thread that waits for all of them."""

    __slots__ = ("_left", "_lock", "abandoned", "began", "results", "rows", "started")

    def __init__(self, count: int) -> None:
        """Expect `count` results."""
        self._expect(count)
        # A lock that is held until the last result is there: lighter than an Event.
        self._lock = threading.Lock()
        self._lock.acquire()

    def _expect(self, count: int) -> None:
        self.results: list[Any] = [None] * count
        self.rows: list[tuple[int, int, list[Tensor | None]]] = []  # results of a PushMany: place, count, outputs
        self.began = time.perf_counter()
        self.started = False  # a tick has begun with one of its operations
        self.abandoned = False  # nobody waits any longer
        self._left = count

    def put(self, place: int, result: Any) -> bool:
        """Store one result and return whether it was the last. Called only within a tick."""
        self.results[place] = result
        self._left -= 1
        return not self._left

    @property
    def callers(self) -> int:
        """How many wait for it."""
        return 1

    def at(self, place: int) -> tuple[ResultFuture, int]:
        """Return the future, and the place in it, of one input of a PushMany that is run by itself."""
        return self, place

    def put_rows(self, place: int, count: int, leaves: list[Tensor | None]) -> bool:
        """Store the outputs of `count` inputs, from `place` on, and return whether they were the last."""
        self.rows.append((place, count, leaves))
        self._left -= count
        return not self._left

    @property
    def cancelled(self) -> bool:
        """Whether nobody waits any longer."""
        return self.abandoned

    def abandon(self, timeout: float | None) -> Exception:
        """Wait no longer, and return the error that says so: what has not begun yet never will."""
        # First this, then the look at `started`. A tick does it the other way round, so one of the two sees the other.
        self.abandoned = True
        if self.started:
            return TimeoutError(
                f"no answer within {timeout} s. The input may yet be applied: repeat it with the same seq to find out."
            )
        return DeadlineExceeded(
            f"the turn of this input did not come within {timeout} s, so it was not applied and will not be. There is "
            f"more to do than can be done in that time: allow more of it, or send less."
        )

    def notify(self) -> None:
        """Wake the caller."""
        self._lock.release()

    def wait(self, timeout: float | None) -> list[Any]:
        """Block until all results are there, and return them."""
        if not self._lock.acquire(timeout=-1 if timeout is None else timeout):
            raise self.abandon(timeout)
        return self.results


class AsyncResultFuture(ResultFuture):
    """The same for a coroutine, which awaits `waiter`."""

    __slots__ = ("loop", "waiter")

    def __init__(self, count: int) -> None:
        """Expect `count` results in the running event loop."""
        self._expect(count)
        self.loop = asyncio.get_running_loop()
        self.waiter: asyncio.Future[Any] = self.loop.create_future()

    @staticmethod
    def of(waiter: asyncio.Future[Any], began: float) -> AsyncResultFuture:
        """Return the future of one result for whoever awaits `waiter`."""
        future = AsyncResultFuture.__new__(AsyncResultFuture)
        future._expect(1)
        future.loop, future.waiter, future.began = waiter.get_loop(), waiter, began
        return future

    @property
    def cancelled(self) -> bool:
        """Whether the coroutine was cancelled, or waits no longer."""
        return self.abandoned or self.waiter.cancelled()

    async def result(self, timeout: float | None) -> list[Any]:
        """Return all results, as soon as they are there."""
        handle = None if timeout is None else self.loop.call_later(timeout, self._expire, timeout)
        try:
            results: list[Any] = await self.waiter
        finally:
            if handle is not None:
                handle.cancel()
        return results

    def _expire(self, timeout: float) -> None:
        if not self.waiter.done():
            self.waiter.set_exception(self.abandon(timeout))

    def notify(self) -> None:
        """Set the asyncio future; called in its own event loop."""
        if not self.waiter.done():
            self.waiter.set_result(self.results)


class GatheredFuture(AsyncResultFuture):
    """The outputs of inputs that several coroutines of one event loop wait for, each on a future of its own."""

    __slots__ = ("_rebuild", "waiters")

    def __init__(
        self, loop: asyncio.AbstractEventLoop, rebuild: Callable[[Sequence[Sequence[Tensor | None]]], Sequence[Any]]
    ) -> None:
        """Expect inputs of `loop`; `rebuild` makes outputs of columns of tensors."""
        self._expect(0)
        self.loop, self._rebuild = loop, rebuild
        self.waiters: list[asyncio.Future[Any]] = []

    @property
    def cancelled(self) -> bool:
        """Whether one of the coroutines was cancelled."""
        return any([waiter.cancelled() for waiter in self.waiters])

    @property
    def callers(self) -> int:
        """How many of them are about to be woken."""
        return sum([count for _, count, _ in self.rows])

    def at(self, place: int) -> tuple[ResultFuture, int]:
        """Return one of the futures by itself: nobody waits for the others."""
        return AsyncResultFuture.of(self.waiters[place], self.began), 0

    def put_rows(self, place: int, count: int, leaves: list[Tensor | None]) -> bool:
        """Store the outputs of `count` inputs, and return True: nobody waits for the others."""
        self.rows.append((place, count, leaves))
        return True

    def notify(self) -> None:
        """Wake the coroutines whose outputs are there; called in their event loop."""
        rows, self.rows = self.rows, []
        for place, count, leaves in rows:
            # Copies: a caller that keeps its output shall not keep everybody's in memory.
            columns = [[None] * count if leaf is None else _apart(leaf) for leaf in leaves]
            for waiter, output in zip(self.waiters[place : place + count], self._rebuild(columns), strict=True):
                if not waiter.done():
                    waiter.set_result(output)


def _apart(leaf: Tensor) -> Sequence[Tensor]:
    """Return copies of the rows of a tensor."""
    unbound: Any = torch.unbind_copy  # whose stub says that it returns nothing
    rows: Sequence[Tensor] = unbound(leaf.cpu())
    return rows


def running_loop() -> asyncio.AbstractEventLoop | None:
    """Return the event loop that runs in this thread, None where there is none."""
    return asyncio._get_running_loop()


def notify_all(futures: Iterable[ResultFuture]) -> None:
    """Wake the callers of all these futures, with one wake-up per event loop."""
    loops: dict[asyncio.AbstractEventLoop, list[ResultFuture]] = {}
    for future in futures:
        if isinstance(future, AsyncResultFuture):
            loops.setdefault(future.loop, []).append(future)
        else:
            future.notify()
    here = running_loop()
    for loop, theirs in loops.items():
        if loop is here:
            _notify_each(theirs)
            continue
        try:
            loop.call_soon_threadsafe(_notify_each, theirs)
        except RuntimeError:  # the loop is closed, and whoever waited in it is gone
            continue


def _notify_each(futures: list[ResultFuture]) -> None:
    for future in futures:
        future.notify()
