"""What callers ask of sessions: operations, each with a place in a future on which the caller waits for the result.

Every operation is about one session, and has a place in a future. Inputs are operations as well: a `Push` is one input,
a `PushChain` several consecutive inputs to one session, a `PushMany` one input to each of many sessions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .futures import AsyncResultFuture, ResultFuture
from .stores import Blobs

# In place of a result: there is none yet; there will be one in a later tick.
PENDING: Any = object()
LATER: Any = object()


class SessionOperation:
    """Something asked of one session."""

    __slots__ = ("future", "give_up_at", "place", "result", "session")

    def __init__(self, session: str, future: ResultFuture, place: int = 0) -> None:
        """Ask it of `session`; the result goes to `place` in `future`."""
        self.session = session
        self.future = future
        self.place = place
        self.result: Any = PENDING
        self.give_up_at = 0.0  # when to stop waiting for another worker's lease; 0 until it has met one

    def fail(self, error: Exception) -> None:
        """Fail with `error`, unless there is a result already."""
        if self.result is PENDING:
            self.result = error

    def deliver(self, complete: list[ResultFuture]) -> None:
        """Put the result into the future, and add the future to `complete` if this was its last."""
        if self.future.put(self.place, self.result):
            complete.append(self.future)


class Open(SessionOperation):
    """Begin a session."""

    __slots__ = ("exist_ok",)

    def __init__(self, session: str, future: ResultFuture, *, exist_ok: bool = False) -> None:
        """Begin it, or with `exist_ok` continue one that exists."""
        super().__init__(session, future)
        self.exist_ok = exist_ok


class Close(SessionOperation):
    """End a session."""


class Reset(SessionOperation):
    """Put a session back in the initial state; the numbering of its inputs continues."""


class Import(SessionOperation):
    """Put a session in a given state."""

    __slots__ = ("row", "seq", "steps")

    def __init__(self, session: str, future: ResultFuture, *, row: bytes | None, seq: int, steps: int) -> None:
        """Set the state to these raw bytes (None: the initial state), and the last input's number to `seq`."""
        super().__init__(session, future)
        self.row = row
        self.seq = seq
        self.steps = steps


class Fork(SessionOperation):
    """Begin another session in the state of this one."""

    __slots__ = ("target",)

    def __init__(self, session: str, future: ResultFuture, *, target: str) -> None:
        """Begin `target`."""
        super().__init__(session, future)
        self.target = target


class Info(SessionOperation):
    """Describe a session."""


class Export(SessionOperation):
    """Return a session as a file."""


class ListNames(SessionOperation):
    """List sessions."""

    __slots__ = ("after", "limit")

    def __init__(self, prefix: str, future: ResultFuture, *, after: str, limit: int) -> None:
        """List up to `limit` names that begin with `prefix` and come after `after`."""
        super().__init__(prefix, future)
        self.after = after
        self.limit = limit


class OutputRow(NamedTuple):
    """The model's output for one input: one row of a batch, copied into tensors of its own only on request."""

    leaves: list[Tensor | None]  # each (row, ...)
    row: int
    blobs: Blobs | None  # all rows as bytes, where they are kept


class Push(SessionOperation):
    """Apply one input: a tensor, a row of one that holds inputs of many sessions, or raw bytes."""

    __slots__ = ("row", "seq", "single_step", "source", "steps")

    def __init__(
        self,
        session: str,
        future: ResultFuture,
        source: Tensor | memoryview,
        *,
        steps: int,
        single_step: bool,
        seq: int | None,
        place: int = 0,
        row: int | None = None,
    ) -> None:
        """Apply `steps` steps: all of `source`, or row `row` of a tensor `(row, steps, ...)`.

        `single_step` says that the input was given as one step without a time axis, `seq` is its number (None: next).
        """
        # Not through super: there may be hundreds of these in a tick.
        self.session = session
        self.future = future
        self.place = place
        self.result = PENDING
        self.give_up_at = 0.0
        self.source = source
        self.row = row
        self.steps = steps
        self.single_step = single_step
        self.seq = seq

    def piece(self, dtype: torch.dtype, step_shape: tuple[int, ...]) -> Tensor:
        """Return the input as a tensor `(steps, *step_shape)`."""
        if isinstance(self.source, Tensor):
            return self.source.view(self.steps, *step_shape) if self.row is None else self.source[self.row]
        return torch.frombuffer(bytearray(self.source), dtype=dtype).view(self.steps, *step_shape)

    async def outcome(self, timeout: float | None = None) -> Any:
        """Return the result, or raise the error; from then on `seq` is the number that the input was given."""
        assert isinstance(self.future, AsyncResultFuture)
        result = (await self.future.result(timeout))[self.place]
        if isinstance(result, Exception):
            raise result
        return result


async def outcomes(pushes: Sequence[Push]) -> list[Any]:
    """Return the results, errors included, of inputs that share one future and have it to themselves."""
    assert isinstance(pushes[0].future, AsyncResultFuture)
    return await pushes[0].future.result(None)


def when_answered(pushes: Sequence[Push], call: Callable[[], None]) -> None:
    """Call a function, in their event loop, when inputs that share one future have their results."""
    assert isinstance(pushes[0].future, AsyncResultFuture)
    pushes[0].future.waiter.add_done_callback(lambda waiter: call())


class PushChain(SessionOperation):
    """Apply consecutive inputs to one session, all of the same number of steps, in one call of the model."""

    __slots__ = ("pushes",)

    def __init__(self, pushes: list[Push]) -> None:
        """Apply these in order."""
        first = pushes[0]
        super().__init__(first.session, first.future)
        self.pushes = pushes

    @property
    def cancelled(self) -> bool:
        """Whether nobody waits any longer for one of them."""
        return any([future.cancelled for future in {push.future for push in self.pushes}])

    def follows(self, seq: int) -> bool:
        """Return whether these are the inputs that come after number `seq`."""
        return all(push.seq is None or push.seq == seq + ahead for ahead, push in enumerate(self.pushes, 1))

    def fail(self, error: Exception) -> None:
        """Fail every one of them."""
        super().fail(error)
        for push in self.pushes:
            push.fail(error)

    def deliver(self, complete: list[ResultFuture]) -> None:
        """Deliver each one's own result."""
        for push in self.pushes:
            push.deliver(complete)

    def __len__(self) -> int:
        """Return how many there are."""
        return len(self.pushes)


class PushMany(SessionOperation):
    """Apply one row of a tensor to each of many sessions, no two of them the same.

    While all goes well there is no object per input: making these is most of what a large tick costs. When something is
    wrong with one of them, `as_pushes` turns all into single inputs.
    """

    __slots__ = ("callers", "pushes", "seqs", "sessions", "single_step", "source", "steps")

    def __init__(
        self,
        sessions: list[str],
        future: ResultFuture,
        source: Tensor,
        *,
        single_step: bool,
        seqs: list[int | None] | None,
        place: int = 0,
    ) -> None:
        """Apply the rows of `source (row, steps, ...)`; `seqs` are the numbers of the inputs (None: the next)."""
        super().__init__("", future, place)
        self.sessions = sessions
        self.source, self.single_step, self.seqs = source, single_step, seqs
        self.steps = source.shape[1]
        self.pushes: list[Push] | None = None  # once turned into single inputs
        self.callers: dict[str, int] | None = None  # how many of them each caller has, once somebody has counted

    def split(self, count: int) -> tuple[PushMany, PushMany]:
        """Return the first `count` and the others."""
        first, rest = (
            PushMany(
                self.sessions[rows],
                self.future,
                self.source[rows],
                single_step=self.single_step,
                seqs=self.seqs and self.seqs[rows],
                place=self.place + (rows.start or 0),
            )
            for rows in (slice(None, count), slice(count, None))
        )
        return first, rest

    def as_pushes(self) -> list[Push]:
        """Return them as single inputs, which they are from now on."""
        if self.pushes is None:
            seqs: Sequence[int | None] = self.seqs or [None] * len(self)
            self.pushes = []
            for row, (session, seq) in enumerate(zip(self.sessions, seqs, strict=True)):
                future, place = self.future.at(self.place + row)
                push = Push(
                    session,
                    future,
                    self.source,
                    steps=self.steps,
                    single_step=self.single_step,
                    seq=seq,
                    place=place,
                    row=row,
                )
                self.pushes.append(push)
        return self.pushes

    def deliver(self, complete: list[ResultFuture]) -> None:
        """Deliver the outputs of all rows at once."""
        if self.future.put_rows(self.place, len(self), self.result):
            complete.append(self.future)

    def __len__(self) -> int:
        """Return how many there are."""
        return len(self.sessions)


def flattened(ops: Sequence[SessionOperation], *, split: bool = False) -> list[SessionOperation]:
    """Return operations as they have results: a PushMany that was split, and a chain that was cut, as single inputs.

    With `split`, every PushMany is split.
    """
    flat: list[SessionOperation] = []
    for op in ops:
        if isinstance(op, PushMany) and (split or op.pushes is not None):
            flat += op.as_pushes()
        elif type(op) is PushChain and len(op) == 1:
            flat += op.pushes
        else:
            flat.append(op)
    return flat
