"""The interface of a store of sessions, and the values that go in and out of it."""

from __future__ import annotations

import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from ...errors import SessionLost
from ...state import Format, State

Ints: TypeAlias = "np.ndarray[Any, np.dtype[np.int64]]"
Floats: TypeAlias = "np.ndarray[Any, np.dtype[np.float64]]"

RANDOM_BITS = 21  # of a version; the others count
_FIRST_DAY = 1_577_836_800  # 2020, in seconds since the epoch


def next_version(version: int = 0) -> int:
    """Return the version after this one, or the first of a new session: a count, and behind it random bits.

    A store that is set back to an older copy counts the same numbers again, but never draws the same ones: what a
    worker remembers under a version is never taken for something else. A new session begins with the milliseconds since
    2020: later than an older one of its name can have come to, unless that changed a thousand times a second.
    """
    count = (version >> RANDOM_BITS) + 1 if version else int(1e3 * (time.time() - _FIRST_DAY))
    return (count << RANDOM_BITS) | secrets.randbits(RANDOM_BITS) | 1


def strayed(known: int, version: int) -> bool:
    """Return whether a session at `version` can never have been at the version that is `known` of it."""
    return known >= 0 and version != known and version >> RANDOM_BITS <= known >> RANDOM_BITS


def damaged(session: str, why: object = "") -> SessionLost:
    """Return the error for a session whose row cannot be read."""
    return SessionLost(
        f"session {session!r} is lost: its row is damaged{f' ({why})' if why else ''}. Put it back with an exported "
        f"state (import), or begin it anew with open({session!r}).",
        "damaged",
    )


class Lookup:
    """An integer for each name, looked up by the hundred: the answer to the last list of names is remembered.

    >>> where = Lookup()
    >>> where.add("a", 3)
    >>> where.all(["a", "b"]).tolist()
    [3, -1]
    """

    __slots__ = ("_asked", "_found", "names")

    def __init__(self) -> None:
        """Start empty."""
        self.names: dict[str, int] = {}  # read only
        self._asked: list[str] | None = None
        self._found: Ints = np.zeros(0, np.int64)

    def add(self, name: str, number: int) -> None:
        """Set the number of a name."""
        self._asked = None
        self.names[name] = number

    def remove(self, name: str) -> int | None:
        """Remove a name, and return the number that it had."""
        self._asked = None
        return self.names.pop(name, None)

    def all(self, names: list[str]) -> Ints:
        """Return the number of each name, -1 where there is none; not to be changed."""
        if names != self._asked:  # comparing the same string objects takes next to no time
            known = self.names
            self._found = np.array([known.get(name, -1) for name in names], np.int64)
            self._asked = list(names)
        return self._found


class Row(NamedTuple):
    """What a store keeps of a session."""

    seq: int  # of the last input applied, 0 before the first
    steps: int  # applied in all
    opened: float  # seconds since the epoch, as all times here
    touched: float
    fingerprint: str  # of the model that the state belongs to
    state: bytes | None  # None: the session starts from the initial state


class Claim(NamedTuple):
    """A session as the store has it, ready to be changed."""

    token: int  # a change is accepted only with it
    version: int  # of the row; it differs after every change
    row: Row | None  # None where the caller knows this version already
    strayed: bool = False  # the version that the caller knows is not among those that led here: the store was set back
    damage: SessionLost | None = None  # the row cannot be read, and this says why: it may only be removed or replaced


class Busy(NamedTuple):
    """In place of a claim: another worker is changing the session."""

    seconds: float  # until its lease ends at the latest


class Change(NamedTuple):
    """A change to one session."""

    session: str
    token: int | None  # of the claim; None: the session must not exist
    row: Row | None  # None: the session is removed
    answer: Any = None  # to input `row.seq`; kept beside earlier ones
    anew: bool = False  # the session is replaced as a whole: earlier answers are dropped


class Blobs:
    """States or outputs, one per row, that a store turns into bytes in the form it needs."""

    __slots__ = ("_rows", "_state", "kind")

    def __init__(self, kind: Format, state: State) -> None:
        """Hold the rows of `state`, whose format is `kind`."""
        self.kind, self._state = kind, state
        self._rows: list[bytes] | None = None

    def bare(self) -> list[bytes]:
        """Return the raw bytes of each row."""
        if self._rows is None:
            self._rows = self.kind.rows(self._state)
        return self._rows

    def sealed(self) -> list[bytes]:
        """Return each row as a safetensors file."""
        return [self.kind.seal(row) for row in self.bare()]

    def pieces(self) -> list[Any]:
        """Return the raw bytes as arrays `(row, byte)`, to be joined along bytes, that nobody else changes."""
        return self.kind.pieces(self._state)

    def select(self, rows: Sequence[int]) -> Blobs:
        """Return these rows alone."""
        return Blobs(self.kind, self._state.select(list(rows)))


class Advance(NamedTuple):
    """Changes to all sessions of one batch, as columns: there may be hundreds in a tick."""

    sessions: list[str]
    tokens: Ints
    seqs: Ints  # of the last input applied to each
    steps: Ints
    opened: Floats
    states: Blobs
    answers: Blobs | None  # to the inputs applied: all of the first session, then all of the second
    inputs: int  # applied to each session
    touched: float
    fingerprint: str

    def changes(self) -> list[Change]:
        """Return the same as single changes, with files; only where one input was applied to each session."""
        assert self.inputs == 1
        answers = [None] * len(self.sessions) if self.answers is None else self.answers.sealed()
        numbers = (column.tolist() for column in (self.tokens, self.seqs, self.steps, self.opened))
        each = zip(self.sessions, *numbers, self.states.sealed(), answers, strict=True)
        return [
            Change(session, token, Row(seq, steps, opened, self.touched, self.fingerprint, state), answer)
            for session, token, seq, steps, opened, state, answer in each
        ]

    def last(self, count: int) -> tuple[Ints, Ints]:
        """Return the numbers of each session's last `count` inputs, `(session, input)`, and their rows in `answers`."""
        ahead = np.arange(max(0, self.inputs - count), self.inputs)
        numbers = self.seqs[:, None] - (self.inputs - 1) + ahead
        return numbers, np.arange(len(self.seqs))[:, None] * self.inputs + ahead


class Store(ABC):
    """Sessions by name: a row for each, and its last answers.

    No two methods are called at once. A failing disk, lock or connection raises `StoreFailed`.
    """

    shared = False  # whether several workers may use it at once, so that every change needs a claim
    chains = False  # whether one tick may apply several inputs to a session
    sealed = True  # whether states and answers are kept as safetensors files, rather than as raw bytes

    replay = 8  # how many answers of each session are kept
    ttl: float | None = None  # seconds without an input after which a session expires
    replaced = False  # whether `others_wrote`, when last asked, found another store in the place of the one it knew
    patient = True  # whether a call may wait for a lock; if not, and there is one, it raises `StoreBusy`
    seconds = 0.0  # spent in reading and writing since the start, waiting included
    waited = 0.0  # of these, without computing: for a disk, a lock, a network

    @abstractmethod
    def claim(self, wanted: Sequence[tuple[str, int]]) -> list[Claim | Busy | SessionLost | None]:
        """Return each session, given by name and known version (-1: none), for a change; None where there is none.

        One that is damaged is a claim with `damage`, or where it cannot even be replaced an error in its place, so that
        the others are served.
        """

    @abstractmethod
    def commit(self, changes: Sequence[Change]) -> list[int | None]:
        """Make changes durable in one transaction; return the new version of each, None where its token is outdated."""

    def advance(self, advances: Sequence[Advance], changes: Sequence[Change]) -> list[int | None]:
        """Make all of these durable in one transaction, and return versions, session by session, as `commit` does."""
        return self.commit([*(change for advance in advances for change in advance.changes()), *changes])

    @abstractmethod
    def read(self, session: str) -> Row | None:
        """Return a session without claiming it."""

    @abstractmethod
    def answer(self, session: str, seq: int) -> Any:
        """Return the kept answer to input `seq`, None where it is no longer kept."""

    @abstractmethod
    def sessions(self, prefix: str, after: str, limit: int) -> list[str]:
        """Return up to `limit` names that begin with `prefix` and come after `after`, in order."""

    @abstractmethod
    def count(self) -> int:
        """Return how many sessions there are."""

    @abstractmethod
    def sweep(self, before: float, limit: int) -> int:
        """Look at up to `limit` sessions, remove those last touched before `before`, and return how many these were."""

    def others_wrote(self) -> bool:
        """Return whether somebody else has written to a store that is not shared since the last call."""
        return False

    def release(self, claims: Sequence[tuple[str, int]]) -> None:  # noqa: B027 - most have nothing to give back
        """Give back claims, by session and token, that led to no change."""

    def check(self) -> None:
        """Raise `StoreFailed` where it is plain that nothing could be read or written now."""
        self.count()

    def upkeep(self) -> None:  # noqa: B027 - most need none
        """Do what can wait until nobody waits for an answer; called from time to time."""

    @abstractmethod
    def close(self) -> None:
        """Close files and connections."""

    @contextmanager
    def timed(self) -> Iterator[None]:
        """Add the time of what is done within to `seconds` and `waited`."""
        began, worked = time.perf_counter(), time.thread_time()
        try:
            yield
        finally:
            seconds = time.perf_counter() - began
            self.seconds += seconds
            self.waited += max(0.0, seconds - (time.thread_time() - worked))
