"""What callers ask of an engine, and how they wait for it."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterable
from typing import Any

from torch import Tensor


class Ticket:
    """What a caller waits on: the results of one or more operations."""

    __slots__ = ("_left", "_lock", "began", "results", "rows")

    def __init__(self, count: int) -> None:
        """Wait for `count` results."""
        self._expect(count)
        # A lock that is held until the last result is there: lighter than an Event.
        self._lock = threading.Lock()
        self._lock.acquire()

    def _expect(self, count: int) -> None:
        self.results: list[Any] = [None] * count
        self.rows: list[tuple[int, int, list[Tensor | None]]] = []  # results that came at once: place, count, outputs
        self.began = time.perf_counter()
        self._left = count

    def put(self, place: int, result: Any) -> bool:
        """Take a result; True when it was the last. Called by the engine's thread alone."""
        self.results[place] = result
        self._left -= 1
        return not self._left

    def put_rows(self, place: int, count: int, leaves: list[Tensor | None]) -> bool:
        """Take the outputs of `count` inputs, from `place` on; True when they were the last."""
        self.rows.append((place, count, leaves))
        self._left -= count
        return not self._left

    @property
    def cancelled(self) -> bool:
        """Whether nobody waits any longer."""
        return False

    def tell(self) -> None:
        """Wake the caller."""
        self._lock.release()

    def wait(self, timeout: float | None) -> list[Any]:
        """Return the results when all are there."""
        if not self._lock.acquire(timeout=-1 if timeout is None else timeout):
            raise TimeoutError(
                f"no answer within {timeout} s. The input may yet be applied: repeat it with the same seq to find out."
            )
        return self.results


class AsyncTicket(Ticket):
    """A ticket that a coroutine waits on."""

    __slots__ = ("future", "loop")

    def __init__(self, count: int) -> None:
        """Wait for `count` results in the running event loop."""
        self._expect(count)
        self.loop = asyncio.get_running_loop()
        self.future: asyncio.Future[list[Any]] = self.loop.create_future()

    @property
    def cancelled(self) -> bool:
        """Whether the coroutine was cancelled."""
        return self.future.cancelled()

    def tell(self) -> None:
        """Set the future; called in its own loop."""
        if not self.future.done():
            self.future.set_result(self.results)


def tell(tickets: Iterable[Ticket]) -> None:
    """Wake all these callers, each event loop once."""
    loops: dict[asyncio.AbstractEventLoop, list[Ticket]] = {}
    for ticket in tickets:
        if isinstance(ticket, AsyncTicket):
            loops.setdefault(ticket.loop, []).append(ticket)
        else:
            ticket.tell()
    here = asyncio._get_running_loop()
    for loop, theirs in loops.items():
        if loop is here:
            _tell_all(theirs)
            continue
        try:
            loop.call_soon_threadsafe(_tell_all, theirs)
        except RuntimeError:  # the loop is closed, and whoever waited in it is gone
            continue


def _tell_all(tickets: list[Ticket]) -> None:
    for ticket in tickets:
        ticket.tell()


# In place of a result: none yet; and one that will come in a later tick.
PENDING: Any = object()
LATER: Any = object()


class Op:
    """Something asked of one session."""

    __slots__ = ("patience", "place", "result", "session", "ticket")

    def __init__(self, session: str, ticket: Ticket, place: int = 0) -> None:
        """Ask it of `session`; the result goes to `place` of `ticket`."""
        self.session = session
        self.ticket = ticket
        self.place = place
        self.result: Any = PENDING
        self.patience = 0.0  # until when it waits for another worker's lease, once it has met one

    def fail(self, error: Exception) -> None:
        """Let it fail, unless it has a result already."""
        if self.result is PENDING:
            self.result = error

    def settle(self, tickets: list[Ticket]) -> None:
        """Give the result to the ticket, and add that to `tickets` when it was the last."""
        if self.ticket.put(self.place, self.result):
            tickets.append(self.ticket)


class Open(Op):
    """Begin a session."""

    __slots__ = ("exist_ok",)

    def __init__(self, session: str, ticket: Ticket, *, exist_ok: bool = False) -> None:
        """Begin it, or with `exist_ok` take the one that is there."""
        super().__init__(session, ticket)
        self.exist_ok = exist_ok


class Close(Op):
    """End a session."""


class Reset(Op):
    """Let a session start anew, its numbering going on."""


class Import(Op):
    """Put a session in a given state."""

    __slots__ = ("row", "seq", "steps")

    def __init__(self, session: str, ticket: Ticket, *, row: bytes | None, seq: int, steps: int) -> None:
        """Put the session in the state of these bare bytes (None: let it start anew), as after input `seq`."""
        super().__init__(session, ticket)
        self.row = row
        self.seq = seq
        self.steps = steps


class Fork(Op):
    """Begin another session in the state of this one."""

    __slots__ = ("target",)

    def __init__(self, session: str, ticket: Ticket, *, target: str) -> None:
        """Begin `target`."""
        super().__init__(session, ticket)
        self.target = target


class Info(Op):
    """Tell about a session."""


class Export(Op):
    """Give a session's state as bytes."""


class Names(Op):
    """List sessions."""

    __slots__ = ("after", "limit")

    def __init__(self, prefix: str, ticket: Ticket, *, after: str, limit: int) -> None:
        """List up to `limit` names that begin with `prefix` and come after `after`."""
        super().__init__(prefix, ticket)
        self.after = after
        self.limit = limit
