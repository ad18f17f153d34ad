"""Ticks that event loops run themselves."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

from .queue import Line
from .session_operations import AsyncTicket, Op
from .worker import Worker


class Driving:
    """Lets coroutines' operations stand in line, their tick to be run by their own event loop where it is over soon.

    Two threads in turn would wait for the interpreter's lock far longer than a small tick takes.
    """

    def __init__(self, worker: Worker, line: Line, *, max_wait: float) -> None:
        """Drive `worker`, which takes from `line`; wait no longer than `max_wait` seconds for others to join a tick."""
        self._worker, self._line, self._max_wait = worker, line, max_wait
        self._driver: asyncio.AbstractEventLoop | None = None  # that is about to run a tick
        self._seen, self._since = 0, 0.0  # how many stood in line when it last looked; when it first did

    def stand(self, ops: Sequence[Op]) -> None:
        """Take operations of a coroutine in the running loop."""
        quick = self._worker.quick
        self._line.add(ops, quietly=quick)
        if quick:
            self._call(asyncio.get_running_loop())

    def stand_here(self, ops: Sequence[Op]) -> None:
        """Take operations of a thread that waits for them, their tick to be run by itself if none is under way."""
        self._line.add(ops, quietly=True)
        if not self._worker.tick_now() or self._line.first is not None:
            self._line.call()

    def pass_on(self, op: Op) -> None:
        """Decide who sees to `op` and all else that is left after a tick of the worker's own thread."""
        if self._worker.quick and isinstance(op.ticket, AsyncTicket):
            try:
                op.ticket.loop.call_soon_threadsafe(self._drive, op.ticket.loop)
            except RuntimeError:  # it is closed
                self._line.call()
        else:
            self._line.call()

    def _call(self, loop: asyncio.AbstractEventLoop) -> None:
        if self._driver is not loop:
            self._driver = loop
            self._seen, self._since = 0, time.monotonic()
            loop.call_soon(self._drive, loop)

    def _drive(self, loop: asyncio.AbstractEventLoop) -> None:
        standing = len(self._line)
        # As long as others come in every turn of the loop, let them: a tick costs much the same for one as for many.
        if standing > self._seen and time.monotonic() - self._since < self._max_wait:
            self._seen = standing
            loop.call_soon(self._drive, loop)
            return
        self._driver = None  # before the tick: whoever comes after it calls anew
        if not self._worker.tick_now():
            self._line.call()
        elif self._line.first is not None:
            self._call(loop)
