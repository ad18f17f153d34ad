"""The queue of operations: in the order they came, callers in turn, and from each session only one at a time."""

from __future__ import annotations

import heapq
import itertools
import threading
import time
from collections import Counter, deque
from collections.abc import Sequence

from ..errors import Overloaded, ServeError
from .session_operations import PENDING, ListNames, Push, PushChain, PushMany, SessionOperation

_LONGEST_CHAIN = 32  # inputs of one session in a tick
_MOST_STEPS = 64  # of all inputs of a chain
_MOST_ARRIVING = 1024  # operations that are not sorted yet


class ReadyOperations:
    """Operations that could be run now, those of each caller in the order they came; callers take turns."""

    def __init__(self) -> None:
        """Start empty."""
        self._callers: dict[str, deque[SessionOperation]] = {}  # those who have any, whoever is next in front
        self._count = 0

    def __len__(self) -> int:
        """Return how many operations there are."""
        return self._count

    @property
    def first(self) -> SessionOperation | None:
        """The operation that is next."""
        for own in self._callers.values():
            return own[0]
        return None

    def append(self, op: SessionOperation) -> None:
        """Add an operation behind the others of its caller."""
        caller = caller_of(op.sessions[0] if type(op) is PushMany else op.session)
        own = self._callers.get(caller)
        if own is None:
            own = self._callers[caller] = deque()
        own.append(op)
        self._count += 1

    def pop(self, limit: int) -> list[SessionOperation]:
        """Remove and return operations on up to `limit` sessions, as many of each caller where they do not suffice."""
        taken: list[SessionOperation] = []
        callers = self._callers
        while callers and limit > 0:
            share = max(1, limit // len(callers))
            for caller in list(callers):
                own, room = callers.pop(caller), min(share, limit)
                limit -= room
                while own and room > 0:
                    op = own.popleft()
                    if type(op) is PushMany:
                        if len(op) > room:
                            op, rest = op.split(room)
                            own.appendleft(rest)
                            self._count += 1
                        room -= len(op)
                    else:
                        room -= 1
                    taken.append(op)
                limit += room
                if own:
                    callers[caller] = own  # behind all others, which are next
                if not limit:
                    break
        self._count -= len(taken)
        return taken


class OperationQueue:
    """Operations that wait for their tick. Callers add from any thread; whoever runs a tick takes, and reports back.

    An operation is ready when none before it in its session is ready or in a tick; until then it waits behind them.
    Ready operations are taken by the worker's own thread once it is notified, or by the thread that added them.

    No flood takes all of the queue: what one session has waiting, or one caller has in it, is never more than what is
    left for everybody else.
    """

    def __init__(self, *, max_size: int, max_wait: float, chains: bool = False) -> None:
        """Hold at most `max_size` operations; `take` waits up to `max_wait` seconds for more to join a tick.

        With `chains`, inputs that wait behind an input of their own session are taken together with it.
        """
        self._max_size, self._max_wait, self._chains = max_size, max_wait, chains
        lock = threading.Lock()
        self._changed = threading.Condition(lock)  # something is there for the worker's own thread
        self._joined = threading.Condition(lock)  # as many are there as whoever is about to run a tick waits for
        self._awaited = 0  # how many that is, 0 where nobody waits
        self._arriving: deque[SessionOperation] = deque()  # added without the lock, and not sorted yet
        self._ready = ReadyOperations()
        # For each session with an operation that is ready or in a tick: the operations that wait behind it.
        self._waiting: dict[str, deque[SessionOperation] | None] = {}
        self._held: dict[str, int] = {}  # operations of each caller that has a name
        self._delayed: list[tuple[float, int, SessionOperation]] = []  # a heap by time
        self._numbers = itertools.count()
        self._size = 0
        self._closed = False
        self._notified = False  # what is ready is for the worker's own thread, not for the thread that added it
        self._taken = 0.0  # when `take_now` was last called
        self._expected = 1  # how many `take` returned last time

    def __len__(self) -> int:
        """Return how many operations there are, those in a tick included."""
        return self._size + len(self._arriving)

    def add(self, ops: Sequence[SessionOperation], *, notify: bool = True) -> None:
        """Add all of these operations or none; without `notify` the caller runs their tick itself."""
        with self._changed:
            self._sort()
            self._check(ops, _count(ops))
            self._enter(ops)
            if self._awaited and len(self._ready) >= self._awaited:
                self._joined.notify()
            if notify:
                self._notify()

    def append(self, ops: Sequence[SessionOperation]) -> None:
        """Do as `add` without `notify`, for operations that many add one by one: they are sorted together later."""
        if len(self._arriving) >= _MOST_ARRIVING or type(ops[0]) is PushMany:
            self.add(ops, notify=False)
            return
        self._check(ops, len(ops))
        self._arriving.extend(ops)
        if self._closed:  # just now: the worker's thread may have seen the queue empty, and be gone
            with self._changed:
                left = [op for op in ops if op in self._arriving]
                for op in left:
                    self._arriving.remove(op)
            if left:
                raise _closed()

    def _check(self, ops: Sequence[SessionOperation], count: int) -> None:
        """Refuse operations where there is no room for them."""
        if self._closed:
            raise _closed()
        size = len(self)
        if size + count > self._max_size:
            raise Overloaded(
                f"{size} operations are waiting and {count} more would make it over {self._max_size}. "
                f"Try again in a moment, or let more wait: Engine(max_pending=...)."
            )
        left = self._max_size - size
        for op in ops:
            if type(op) is PushMany:
                continue  # at most one for each session
            behind = self._waiting.get(op.session)
            if behind is not None and len(behind) >= left:
                raise Overloaded(
                    f"{len(behind)} operations of session {op.session!r} are waiting, and the queue has room for "
                    f"{left} more, which is left to other sessions. Send the next input when the last is answered."
                )
        for caller, more in _by_caller(ops).items():
            held = self._held.get(caller, 0)
            if held + more > max(left, 1):
                raise Overloaded(
                    f"{held} operations of caller {caller!r} are waiting, {more} more would be over the {left} for "
                    f"which the queue has room, and as many are left to other callers. Try again in a moment."
                )

    @property
    def first(self) -> SessionOperation | None:
        """The operation that would be taken now."""
        with self._changed:
            self._sort()
            return self._ready.first

    def notify(self) -> None:
        """Let the worker's own thread take what is ready."""
        with self._changed:
            self._notify()

    def take_now(self, limit: int, *, join: bool = False) -> list[SessionOperation]:
        """Return the operations for a tick that begins now; there may be none. With `join`, others may join it."""
        with self._changed:
            self._sort()
            self._release_delayed()
            self._taken = time.monotonic()
            return self._take(limit) if join else self._pop(limit)

    def take(self, limit: int, *, timeout: float) -> list[SessionOperation] | None:
        """Wait for a notification, or for `timeout`, and return operations for a tick; None when closed and empty."""
        with self._changed:
            end = time.monotonic() + timeout
            while True:
                self._sort()
                if self._notified and self._ready:
                    break
                if self._closed and not self._size:
                    return None
                until = min(end, self._delayed[0][0] if self._delayed else end)
                self._changed.wait(max(0.0, until - time.monotonic()))
                self._sort()
                self._release_delayed()
                if time.monotonic() >= end:
                    if self._taken > end - timeout:
                        return []  # other threads are taking what is ready
                    break  # the event loop that was to take it may have ended
            self._notified = False
            return self._take(limit)

    def done(self, ops: Sequence[SessionOperation]) -> None:
        """Remove operations whose tick is over; those that waited behind them become ready."""
        with self._changed:
            self._size -= _count(ops)
            if self._held:
                self._let_go(ops)
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
            self._joined.notify()
            self._notify()

    def _sort(self) -> None:
        """Take in what was appended."""
        while self._arriving:
            self._enter([self._arriving.popleft()])

    def _enter(self, ops: Sequence[SessionOperation]) -> None:
        self._size += _count(ops)
        for caller, more in _by_caller(ops).items():
            self._held[caller] = self._held.get(caller, 0) + more
        for op in ops:
            if type(op) is PushMany:
                self._append_many(op)
            else:
                self._append(op)

    def _let_go(self, ops: Sequence[SessionOperation]) -> None:
        """Count operations that are done no longer as their callers'."""
        for caller, fewer in _by_caller(ops).items():
            self._held[caller] -= fewer
            if not self._held[caller]:
                del self._held[caller]

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

    def _take(self, limit: int) -> list[SessionOperation]:
        if self._ready:
            self._wait_for_others(min(limit, self._expected))
        taken = self._pop(limit)
        self._expected = max(1, len(taken))
        return taken

    def _pop(self, limit: int) -> list[SessionOperation]:
        taken = self._ready.pop(limit)
        if self._chains:
            waiting = self._waiting
            for place, op in enumerate(taken):
                if type(op) is Push and (behind := waiting[op.session]):
                    taken[place] = _chained(op, behind)
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
        self._awaited = expected
        while len(self._ready) < expected and not self._closed:
            left = end - time.monotonic()
            if left <= 0 or not self._joined.wait(left):
                break
        self._awaited = 0
        self._sort()


def _closed() -> ServeError:
    return ServeError("the engine is closed: it takes no more inputs.")


def caller_of(session: str) -> str:
    """Return whose session it is: what stands in its name before the first colon, nobody's where there is none.

    >>> caller_of("alice:7"), caller_of("7")
    ('alice', '')
    """
    return session.partition(":")[0] if ":" in session else ""


def _by_caller(ops: Sequence[SessionOperation]) -> dict[str, int]:
    """Return how many operations each caller has among these, without those that are nobody's."""
    found: dict[str, int] = {}
    for op in ops:
        if isinstance(op, PushMany):
            if op.callers is None:
                op.callers = Counter([caller_of(name) for name in op.sessions if ":" in name])
            for caller, count in op.callers.items():
                found[caller] = found.get(caller, 0) + count
        elif ":" in op.session:
            caller = caller_of(op.session)
            found[caller] = found.get(caller, 0) + (len(op) if isinstance(op, PushChain) else 1)
    return found


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
