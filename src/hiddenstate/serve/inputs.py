"""Inputs: one by one, several of one session in a row, or one for each of many sessions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor

from .session_operations import PENDING, AsyncTicket, Op, Ticket
from .stores import Blobs
from .trial import Layout
from .wire import from_raw


class Output(NamedTuple):
    """What the model gave for one row of a call: made into tensors of its own only when the caller takes it."""

    leaves: list[Tensor | None]  # each (row, ...)
    row: int
    blobs: Blobs | None  # all rows as bytes, where they are kept


class Push(Op):
    """Apply a piece of input: one row of a tensor that may hold those of many, or bare bytes."""

    __slots__ = ("alone", "row", "seq", "source", "steps")

    def __init__(
        self,
        session: str,
        ticket: Ticket,
        place: int,
        kind: tuple[Tensor | memoryview, int, bool, int | None],
    ) -> None:
        """Apply row `place` of `(row, steps, ...)`: that, its steps, whether they are one bare step, its number."""
        # Not through super: there may be hundreds of these in a tick.
        self.session = session
        self.ticket = ticket
        self.place = self.row = place
        self.result = PENDING
        self.patience = 0.0
        self.source, self.steps, self.alone, self.seq = kind

    def piece(self, like: Layout) -> Tensor:
        """Return the piece `(steps, ...)`."""
        if isinstance(self.source, Tensor):
            return self.source[self.row]
        return from_raw(self.source, like.dtype, like.step_shape)

    async def outcome(self) -> Any:
        """Return the result, or raise what the input failed with; from then on `seq` is the number it was given."""
        assert isinstance(self.ticket, AsyncTicket)
        result = (await self.ticket.future)[self.place]
        if isinstance(result, Exception):
            raise result
        return result


async def outcomes(pushes: Sequence[Push]) -> list[Any]:
    """Return the results of inputs that have a ticket of their own together, errors among them."""
    assert isinstance(pushes[0].ticket, AsyncTicket)
    return await pushes[0].ticket.future


class Chain(Op):
    """Apply several pieces of as many steps to one session, one after another, in one go."""

    __slots__ = ("pushes",)

    def __init__(self, pushes: list[Push]) -> None:
        """Apply these in order."""
        first = pushes[0]
        super().__init__(first.session, first.ticket)
        self.pushes = pushes

    @property
    def cancelled(self) -> bool:
        """Whether nobody waits any longer for one of them."""
        ticket = self.ticket
        return ticket.cancelled or any([p.ticket is not ticket and p.ticket.cancelled for p in self.pushes])

    def follows(self, seq: int) -> bool:
        """Say whether these are the inputs that come after number `seq`."""
        return all(push.seq is None or push.seq == seq + ahead for ahead, push in enumerate(self.pushes, 1))

    def fail(self, error: Exception) -> None:
        """Fail every one of them."""
        super().fail(error)
        for push in self.pushes:
            push.fail(error)

    def settle(self, tickets: list[Ticket]) -> None:
        """Give each its own result."""
        for push in self.pushes:
            push.settle(tickets)

    def __len__(self) -> int:
        """Return how many there are."""
        return len(self.pushes)


class Many(Op):
    """Apply one row of a tensor to each of many sessions, no two of them the same.

    As long as all goes well nothing is made for each: that is most of what a large tick costs. Otherwise they are
    taken apart, and each goes its own way.
    """

    __slots__ = ("alone", "pushes", "seqs", "sessions", "source", "steps")

    def __init__(
        self, sessions: list[str], ticket: Ticket, place: int, kind: tuple[Tensor, bool, list[int | None] | None]
    ) -> None:
        """Apply `(row, steps, ...)`: that, whether its steps are bare ones, and the number of each (None: the next)."""
        super().__init__("", ticket, place)
        self.sessions = sessions
        self.source, self.alone, self.seqs = kind
        self.steps = self.source.shape[1]
        self.pushes: list[Push] | None = None  # once taken apart

    def split(self, count: int) -> tuple[Many, Many]:
        """Return the first `count` and the others."""
        parts = []
        for rows in (slice(None, count), slice(count, None)):
            kind = (self.source[rows], self.alone, self.seqs and self.seqs[rows])
            parts.append(Many(self.sessions[rows], self.ticket, self.place + (rows.start or 0), kind))
        return parts[0], parts[1]

    def apart(self) -> list[Push]:
        """Take them apart, from now on one by one."""
        if self.pushes is None:
            seqs: Sequence[int | None] = self.seqs or [None] * len(self)
            self.pushes = []
            for row, (session, seq) in enumerate(zip(self.sessions, seqs, strict=True)):
                push = Push(session, self.ticket, self.place + row, (self.source, self.steps, self.alone, seq))
                push.row = row
                self.pushes.append(push)
        return self.pushes

    def settle(self, tickets: list[Ticket]) -> None:
        """Give the outputs of all rows at once."""
        if self.ticket.put_rows(self.place, len(self), self.result):
            tickets.append(self.ticket)

    def __len__(self) -> int:
        """Return how many there are."""
        return len(self.sessions)


def singly(ops: Sequence[Op], *, apart: bool = False) -> list[Op]:
    """Return operations with those that were taken apart, or are to be, one by one."""
    if not any([type(op) is Many for op in ops]):
        return list(ops)
    found: list[Op] = []
    for op in ops:
        if isinstance(op, Many) and (apart or op.pushes is not None):
            found += op.apart()
        else:
            found.append(op)
    return found
