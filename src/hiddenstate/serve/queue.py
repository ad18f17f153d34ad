"""The queue of operations: in the order they came, and from each session only one at a time."""

from __future__ import annotations

import heapq
import itertools
import threading
import time
from collections import deque
from collections.abc import Sequence

from ..errors import Overloaded, ServeError
from .session_operations import PENDING, ListNames, Push, PushChain, PushMany, SessionOperation

_LONGEST_CHAIN = 32  # inputs of one session in a tick
_MOST_STEPS = 64  # of all inputs of a chain


class OperationQueue:
    """Operations that wait for their tick. Callers add from any thread; whoever runs a tick takes, and reports back.

    An operation is ready when none before it in its session is ready or in a tick; until then it waits behind them.
    Ready operations are taken by the worker's own thread once it is notified, or by the thread that added them.
    """

    def __init__(self, *, max_size: int, max_wait: float, chains: bool = False) -> None:
        """Hold at most `max_size` operations; `take` waits up to `max_wait` seconds for more to join a tick.

        With `chains`, inputs that wait behind an input of their own session are taken together with it.
        """
        self._max_size, self._max_wait, self._chains = max_size, max_wait, chains
        self._changed = threading.Condition(threading.Lock())
        self._ready: deque[SessionOperation] = deque()
        # For each session with an operation that is ready or in a tick: the operations that wait behind it.
        self._waiting: dict[str, deque[SessionOperation] | None] = {}
        self._delayed: list[tuple[float, int, SessionOperation]] = []  # a heap by time
        self._numbers = itertools.count()
        self._size = 0
        self._closed = False
        self._notified = False  # what is ready is for the worker's own thread, not for the thread that added it
        self._taken = 0.0  # when `take_now` was last called
        self._expected = 1  # how many `take` returned last time

    def __len__(self) -> int:
        """Return how many operations there are, those in a tick included."""
        return self._size

    def add(self, ops: Sequence[SessionOperation], *, notify: bool = True) -> None:
        """Add all of these operations or none; without `notify` the caller runs their tick itself."""
        count = _count(ops)
        with self._changed:
            if self._closed:
                raise ServeError("the engine is closed: it takes no more inputs.")
            if self._size + count > self._max_size:
                raise Overloaded(
                    f"{self._size} operations are waiting and {count} more would make it over {self._max_size}. "
                    f"Try again in a moment, or let more wait: Engine(max_pending=...)."
                )
            self._size += count
            for op in ops:
                if type(op) is PushMany:
                    self._append_many(op)
                else:
                    self._append(op)
            if notify:
                self._notify()

    @property
    def first(self) -> SessionOperation | None:
        """The operation that would be taken now."""
        with self._changed:
            return self._ready[0] if self._ready else None

    def notify(self) -> None:
        """Let the worker's own thread take what is ready."""
        with self._changed:
            self._notify()

    def take_now(self, limit: int) -> list[SessionOperation]:
        """Return the operations for a tick that begins now; there may be none."""
        with self._changed:
            self._release_delayed()
            self._taken = time.monotonic()
            return self._pop(limit)

    def take(self, limit: int, *, timeout: float) -> list[SessionOperation] | None:
        """Wait for a notification, or for `timeout`, and return operations for a tick; None when closed and empty."""
        with self._changed:
            end = time.monotonic() + timeout
            while not (self._notified and self._ready):
                if self._closed and not self._size:
                    return None
                until = min(end, self._delayed[0][0] if self._delayed else end)
                self._changed.wait(max(0.0, until - time.monotonic()))
                self._release_delayed()
                if time.monotonic() >= end:
                    if self._taken > end - timeout:
                        return []  # other threads are taking what is ready
                    break  # the event loop that was to take it may have ended
            self._notified = False
            if self._ready:
                self._wait_for_others(min(limit, self._expected))
            taken = self._pop(limit)
            self._expected = max(1, len(taken))
            return taken

    def done(self, ops: Sequence[SessionOperation]) -> None:
        """Remove operations whose tick is over; those that waited behind them become ready."""
        with self._changed:
            self._size -= _count(ops)
            waiting = self._waiting
            for op in ops:
                if type(op) is ListNames:
                    continue
                if type(op) is PushMany and len(op) == len(waiting) and not any(waiting.values()):
                    waiting.clear()  # the queue knows only these sessions, and nothing waits behind any of them
                    continue
                for session in op.sessions if type(op) is PushMany else (op.session,):
                    if behind := waiting.pop(session):
                        self._ready.append(behind.popleft())
                        waiting[session] = behind
            if self._closed:
                self._notify()

    def put_back(self, chain: PushChain) -> None:
        """Cut a chain that was taken to its first input; the others wait again, in front of all behind them."""
        first, *others = chain.pushes
        with self._changed:
            self._behind(chain.session).extendleft(reversed(others))
        chain.pushes = [first]

    def delay(self, op: SessionOperation, seconds: float) -> None:
        """Make an operation that was taken ready again later, before those that wait behind it."""
        with self._changed:
            heapq.heappush(self._delayed, (time.monotonic() + seconds, next(self._numbers), op))
            self._notify()  # a thread that waits in `take` may now have to wait for less long

    def close(self) -> None:
        """Refuse further operations; those already here can still be taken."""
        with self._changed:
            self._closed = True
            self._notify()

    def _append(self, op: SessionOperation) -> None:
        if type(op) is ListNames:
            self._ready.append(op)
        elif op.session in self._waiting:
            self._behind(op.session).append(op)
        else:
            self._waiting[op.session] = None
            self._ready.append(op)

    def _append_many(self, many: PushMany) -> None:
        sessions = dict.fromkeys(many.sessions)
        if len(sessions) == len(many) and self._waiting.keys().isdisjoint(sessions):
            self._waiting.update(sessions)
            self._ready.append(many)
        else:
            for push in many.as_pushes():
                self._append(push)

    def _behind(self, session: str) -> deque[SessionOperation]:
        behind = self._waiting[session]
        if behind is None:
            behind = self._waiting[session] = deque()
        return behind

    def _pop(self, limit: int) -> list[SessionOperation]:
        taken: list[SessionOperation] = []
        ready = self._ready
        while ready and limit > 0:
            op = ready.popleft()
            if type(op) is PushMany:
                if len(op) > limit:
                    op, rest = op.split(limit)
                    ready.appendleft(rest)
                limit -= len(op)
            else:
                if self._chains and type(op) is Push and (behind := self._waiting[op.session]):
                    op = _chained(op, behind)
                limit -= 1
            taken.append(op)
        return taken

    def _notify(self) -> None:
        self._notified = True
        self._changed.notify()

    def _release_delayed(self) -> None:
        now = time.monotonic()
        while self._delayed and self._delayed[0][0] <= now:
            op = heapq.heappop(self._delayed)[2]
            op.result = PENDING
            self._ready.append(op)

    def _wait_for_others(self, expected: int) -> None:
        # Callers that were answered together come back together: wait for as many as came last time, never for more.
        if len(self._ready) >= expected or self._closed or self._max_wait <= 0:
            return
        end = time.monotonic() + self._max_wait
        while len(self._ready) < expected and not self._closed:
            left = end - time.monotonic()
            if left <= 0 or not self._changed.wait(left):
                return


def _count(ops: Sequence[SessionOperation]) -> int:
    if len(ops) == 1 and type(ops[0]) is Push:
        return 1
    return sum([len(op) if isinstance(op, PushChain | PushMany) else 1 for op in ops])


def _chained(first: Push, behind: deque[SessionOperation]) -> SessionOperation:
    """Return an input together with those of the same shape right behind it, a power of two in all.

    Powers of two make it likely that the chains of many sessions have the same length and go into one call.
    """
    fitting, most = 1, min(_LONGEST_CHAIN, _MOST_STEPS // first.steps)
    for op in behind:
        if fitting >= most or type(op) is not Push or op.steps != first.steps or op.single_step != first.single_step:
            break
        fitting += 1
    count = 1 << (fitting.bit_length() - 1)
    if count == 1:
        return first
    return PushChain([first, *(behind.popleft() for _ in range(count - 1))])  # type: ignore[list-item]
