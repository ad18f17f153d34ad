"""What an engine needs of a store, whatever it is made of."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from ...state import Format, State
from .lookup import Floats, Ints


class Row(NamedTuple):
    """What a store keeps of a session."""

    seq: int  # of the last input applied, 0 before the first
    steps: int  # applied in all
    opened: float  # seconds since the epoch, as all times here
    touched: float
    fingerprint: str  # of the model that the state belongs to
    state: bytes | None  # None: the session starts from the initial state


class Claim(NamedTuple):
    """A session as it was found."""

    token: int  # to be shown when it is changed
    version: int  # of the row; another one means that it was changed since
    row: Row | None  # None where the version is the one that the caller knows already


class Busy(NamedTuple):
    """Another worker is in the midst of changing the session."""

    seconds: float  # after which its lease ends, at the latest


class Change(NamedTuple):
    """What a tick does to one session."""

    session: str
    token: int | None  # of the claim; None: there must be no such session
    row: Row | None  # None: it is removed
    answer: Any = None  # to the input `row.seq`; kept beside earlier ones
    anew: bool = False  # earlier answers are dropped


class Blobs:
    """Rows of one kind, on their way to a store that takes them as it likes."""

    __slots__ = ("_rows", "_state", "kind")

    def __init__(self, kind: Format, state: State) -> None:
        """Take the rows of `state`, which are of that kind."""
        self.kind, self._state = kind, state
        self._rows: list[bytes] | None = None

    def bare(self) -> list[bytes]:
        """Return the bare bytes of each."""
        if self._rows is None:
            self._rows = self.kind.rows(self._state)
        return self._rows

    def sealed(self) -> list[bytes]:
        """Return each as a file."""
        return [self.kind.seal(row) for row in self.bare()]

    def pieces(self) -> list[Any]:
        """Return the same as arrays of bytes, `(row, byte)`, that lie side by side, and that nobody else changes."""
        return self.kind.pieces(self._state)

    def select(self, rows: Sequence[int]) -> Blobs:
        """Return these rows alone."""
        return Blobs(self.kind, self._state.select(list(rows)))


class Advance(NamedTuple):
    """Sessions that one call of the model has moved on, column by column: there may be hundreds in a tick."""

    sessions: list[str]
    tokens: Ints
    seqs: Ints  # of the last input applied to each
    steps: Ints
    opened: Floats
    states: Blobs
    answers: Blobs | None  # to the inputs applied: those of the first session, then those of the second
    inputs: int  # applied to each
    touched: float
    fingerprint: str

    def changes(self) -> list[Change]:
        """Return the same one by one, as files, where one input was applied to each."""
        assert self.inputs == 1
        answers = [None] * len(self.sessions) if self.answers is None else self.answers.sealed()
        numbers = (column.tolist() for column in (self.tokens, self.seqs, self.steps, self.opened))
        each = zip(self.sessions, *numbers, self.states.sealed(), answers, strict=True)
        return [
            Change(session, token, Row(seq, steps, opened, self.touched, self.fingerprint, state), answer)
            for session, token, seq, steps, opened, state, answer in each
        ]

    def last(self, count: int) -> tuple[Ints, Ints]:
        """Return the numbers of the last inputs of each session, `(session, input)`, and which answers are theirs."""
        ahead = np.arange(max(0, self.inputs - count), self.inputs)
        numbers = self.seqs[:, None] - (self.inputs - 1) + ahead
        return numbers, np.arange(len(self.seqs))[:, None] * self.inputs + ahead


class Store(ABC):
    """Sessions by name: their rows, and the last answers of each.

    All methods are called from one thread. What fails for want of a disk, a lock or a connection raises `StoreFailed`.
    """

    shared = False  # several workers may use it at once: every change needs a claim
    chains = False  # takes several inputs of one session in one tick
    sealed = True  # states and answers are kept as files (bytes), rather than as the engine has them

    replay = 8  # how many answers of each session are kept
    ttl: float | None = None  # after how many seconds of silence a session expires

    @abstractmethod
    def claim(self, wanted: Sequence[tuple[str, int]]) -> list[Claim | Busy | None]:
        """Return each session, asked for by name and known version (-1: none), to be changed; None: there is none."""

    @abstractmethod
    def commit(self, changes: Sequence[Change]) -> list[int | None]:
        """Make the changes durable in one transaction: the new version of each, None where its token holds no more."""

    def advance(self, moved: Sequence[Advance], changes: Sequence[Change]) -> list[int | None]:
        """Make what has moved on and other changes durable in one transaction, and return versions as `commit` does."""
        return self.commit([*(change for group in moved for change in group.changes()), *changes])

    @abstractmethod
    def read(self, session: str) -> Row | None:
        """Return a session, to be looked at."""

    @abstractmethod
    def answer(self, session: str, seq: int) -> Any:
        """Return what was answered to input `seq`, None where it is no longer kept."""

    @abstractmethod
    def sessions(self, prefix: str, after: str, limit: int) -> list[str]:
        """Return up to `limit` names that begin with `prefix` and come after `after`, in order."""

    @abstractmethod
    def count(self) -> int:
        """Return how many sessions there are."""

    @abstractmethod
    def sweep(self, before: float, limit: int) -> int:
        """Remove up to `limit` or so sessions last touched before then; return how many."""

    def others_wrote(self) -> bool:
        """Say whether somebody else has changed anything since this was last asked, of a store that is not shared."""
        return False

    def release(self, claims: Sequence[tuple[str, int]]) -> None:  # noqa: B027 - most have nothing to give back
        """Give back claims, by session and token, that came to no change."""

    @abstractmethod
    def close(self) -> None:
        """Let go of files and connections."""
