"""Who is next: operations in the order they came, one at a time for each session."""

from __future__ import annotations

import heapq
import itertools
import threading
import time
from collections import deque
from collections.abc import Sequence

from ..errors import Overloaded, ServeError
from .inputs import Chain, Many, Push
from .session_operations import PENDING, Names, Op

_LONGEST = 32  # inputs of one session in a tick
_MOST_STEPS = 64  # of all of them


class Line:
    """Operations that wait for their tick. Callers add from any thread; one thread takes, and says when it is done."""

    def __init__(self, *, most: int, max_wait: float, chains: bool = False) -> None:
        """Let at most `most` wait at once, and none longer than `max_wait` seconds for others to join its tick.

        With `chains`, inputs that wait behind one of their own session are taken together with it.
        """
        self._most, self._max_wait, self._chains = most, max_wait, chains
        self._changed = threading.Condition(threading.Lock())
        self._ready: deque[Op] = deque()
        # Of each session that has an operation ready or under way, those that come after it.
        self._behind: dict[str, deque[Op] | None] = {}
        self._delayed: list[tuple[float, int, Op]] = []
        self._numbers = itertools.count()
        self._size = 0
        self._closed = False
        self._called = False  # what is ready is for the thread that waits, rather than for an event loop
        self._taken = 0.0  # when an event loop or a caller last took something
        self._expected = 1  # how many came together last time

    def __len__(self) -> int:
        """Return how many operations are here, those under way included."""
        return self._size

    def add(self, ops: Sequence[Op], *, quietly: bool = False) -> None:
        """Let operations stand in line, all or none; `quietly` when the caller itself will see to their tick."""
        count = _inputs(ops)
        with self._changed:
            if self._closed:
                raise ServeError("the engine is closed: it takes no more inputs.")
            if self._size + count > self._most:
                raise Overloaded(
                    f"{self._size} operations are waiting and {count} more would make it over {self._most}. "
                    f"Try again in a moment, or let more wait: Engine(max_pending=...)."
                )
            self._size += count
            for op in ops:
                if type(op) is Many:
                    self._stand_together(op)
                else:
                    self._stand(op)
            if not quietly:
                self._call()

    @property
    def first(self) -> Op | None:
        """The operation that would be taken now."""
        with self._changed:
            return self._ready[0] if self._ready else None

    def call(self) -> None:
        """Let the thread that waits take what is ready."""
        with self._changed:
            self._call()

    def take_now(self, limit: int) -> list[Op]:
        """Return the operations of a tick that begins now, perhaps none."""
        with self._changed:
            self._wake()
            self._taken = time.monotonic()
            return self._pop(limit)

    def take(self, limit: int, *, timeout: float) -> list[Op] | None:
        """Return the operations of the next tick when called, or after `timeout`; None when closed and empty."""
        with self._changed:
            end = time.monotonic() + timeout
            while not (self._called and self._ready):
                if self._closed and not self._size:
                    return None
                until = min(end, self._next_delayed() or end)
                self._changed.wait(max(0.0, until - time.monotonic()))
                self._wake()
                if time.monotonic() >= end:
                    if self._taken > end - timeout:
                        return []  # somebody else sees to what is ready
                    break  # the event loop that was to see to it may have ended
            self._called = False
            if self._ready:
                self._wait_for_company(min(limit, self._expected))
            taken = self._pop(limit)
            self._expected = max(1, len(taken))
            return taken

    def done(self, ops: Sequence[Op]) -> None:
        """Let those behind these operations come forward."""
        with self._changed:
            self._size -= _inputs(ops)
            behind = self._behind
            for op in ops:
                if type(op) is Names:
                    continue
                if type(op) is Many and len(op) == len(behind) and not any(behind.values()):
                    behind.clear()  # nobody is behind any of them, and there is nobody else
                    continue
                for session in op.sessions if type(op) is Many else (op.session,):
                    if queue := behind.pop(session):
                        self._ready.append(queue.popleft())
                        behind[session] = queue
            if self._closed:
                self._call()

    def put_back(self, chain: Chain) -> None:
        """Let all but the first input of a chain that was taken stand in line again, before those behind them."""
        first, *others = chain.pushes
        with self._changed:
            queue = self._behind[chain.session]
            if queue is None:
                queue = self._behind[chain.session] = deque()
            queue.extendleft(reversed(others))
        chain.pushes = [first]

    def delay(self, op: Op, seconds: float) -> None:
        """Let an operation that was taken come again later, before those behind it."""
        with self._changed:
            heapq.heappush(self._delayed, (time.monotonic() + seconds, next(self._numbers), op))
            self._call()  # whoever waits may now have to wait for less long

    def close(self) -> None:
        """Take no more; what is here is still to be done."""
        with self._changed:
            self._closed = True
            self._call()

    def _stand(self, op: Op) -> None:
        behind = self._behind
        if type(op) is Names:
            self._ready.append(op)
        elif op.session in behind:
            queue = behind[op.session]
            if queue is None:
                queue = behind[op.session] = deque()
            queue.append(op)
        else:
            behind[op.session] = None
            self._ready.append(op)

    def _stand_together(self, many: Many) -> None:
        sessions = dict.fromkeys(many.sessions)
        if len(sessions) == len(many) and self._behind.keys().isdisjoint(sessions):
            self._behind.update(sessions)
            self._ready.append(many)
        else:
            for push in many.apart():
                self._stand(push)

    def _pop(self, limit: int) -> list[Op]:
        taken: list[Op] = []
        ready = self._ready
        while ready and limit > 0:
            op = ready.popleft()
            if type(op) is Many:
                if len(op) > limit:
                    op, rest = op.split(limit)
                    ready.appendleft(rest)
                limit -= len(op)
            else:
                if self._chains and type(op) is Push and (queue := self._behind[op.session]):
                    op = _chained(op, queue)
                limit -= 1
            taken.append(op)
        return taken

    def _call(self) -> None:
        self._called = True
        self._changed.notify()

    def _next_delayed(self) -> float | None:
        return self._delayed[0][0] if self._delayed else None

    def _wake(self) -> None:
        now = time.monotonic()
        while self._delayed and self._delayed[0][0] <= now:
            op = heapq.heappop(self._delayed)[2]
            op.result = PENDING
            self._ready.append(op)

    def _wait_for_company(self, expected: int) -> None:
        # Callers that were answered together come back together: wait for as many as came last time, never for more.
        if len(self._ready) >= expected or self._closed or self._max_wait <= 0:
            return
        end = time.monotonic() + self._max_wait
        while len(self._ready) < expected and not self._closed:
            left = end - time.monotonic()
            if left <= 0 or not self._changed.wait(left):
                return


def _inputs(ops: Sequence[Op]) -> int:
    if len(ops) == 1 and type(ops[0]) is Push:
        return 1
    return sum([len(op) if isinstance(op, Chain | Many) else 1 for op in ops])


def _chained(first: Push, queue: deque[Op]) -> Op:
    """Return an input together with those of its kind behind it: 2, 4, 8 or so.

    In powers of two, so that many sessions have chains of the same length and go into one call.
    """
    fitting, most = 1, min(_LONGEST, _MOST_STEPS // first.steps)
    for op in queue:
        if fitting >= most or type(op) is not Push or op.steps != first.steps or op.alone != first.alone:
            break
        fitting += 1
    count = 1 << (fitting.bit_length() - 1)
    if count == 1:
        return first
    return Chain([first, *(queue.popleft() for _ in range(count - 1))])  # type: ignore[list-item]
