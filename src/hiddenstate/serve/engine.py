"""The engine: many callers, one state each, batched into one model call per tick."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, Literal

import torch
from torch import Tensor, nn

from ..errors import BadInput
from .arena import Slab
from .driving import Driving
from .inputs import Many, Output, Push
from .model import Served
from .queue import Line
from .session_operations import AsyncTicket, Op, Ticket
from .stats import Snapshot
from .stores import Store, open_store
from .verbs import Verbs, are_numbers, checked
from .worker import Worker

_CPU = torch.device("cpu")


class Engine(Verbs):
    """Serves an unmodified model to many sessions, each with a state of its own.

    An input is acknowledged only after the new state is in the store. A session fed in pieces equals one call:

    >>> model = torch.nn.GRU(3, 4, batch_first=True)
    >>> x = torch.randn(10, 3)
    >>> with Engine(model) as engine:
    ...     session = engine.open()
    ...     pieces = [engine.push(session, x[:6]), engine.push(session, x[6]), engine.push(session, x[7:])]
    >>> whole, _ = model(x.unsqueeze(0))
    >>> torch.allclose(torch.cat([pieces[0], pieces[1].unsqueeze(0), pieces[2]]), whole[0], atol=1e-6)
    True

    While the engine is open, the model is its own; `shutdown`, or the end of `with`, gives it back as it was.
    Every verb has a twin for coroutines, called the same with an `a` in front: `await engine.apush(session, x)`.
    """

    def __init__(
        self,
        model: nn.Module,
        store: str | Store = "memory:",
        *,
        max_batch: int = 256,
        max_sessions: int = 4096,
        max_stored: int = 1_000_000,
        max_pending: int = 100_000,
        max_wait_ms: float = 2.0,
        ttl: float | None = None,
        replay: int = 8,
        example: Tensor | None = None,
        init: Any = "zeros",
        clock: Callable[[], float] = time.time,
    ) -> None:
        """Check that the model can be served, open the store, and start.

        Args:
            model: Any model with recurrent layers of which `hs.check_split` holds.
            store: `memory:`, `sqlite:///path` or `redis://host:port/number`.
            max_batch: Operations in one tick at most.
            max_sessions: States held at hand; those of further sessions lie in the store alone until they are needed.
            max_stored: Sessions in the store at most; further ones are refused (`Overloaded`).
            max_pending: Operations that may wait at once; further ones are refused.
            max_wait_ms: How long an input waits at most for others to join its tick. It waits only for as many as came
                last time, so a lone caller never does.
            ttl: Seconds without an input after which a session expires; None: never.
            replay: How many answers of each session are kept, to be given again when an input is repeated.
            example: An input as the model takes it, where none can be made up.
            init: What a session starts from, as in `hs.Carry`.
            clock: Seconds since the epoch.
        """
        least = {"max_batch": max_batch, "max_sessions": max_sessions, "max_stored": max_stored}
        for name, value in {**least, "max_pending": max_pending}.items():
            if value < 1:
                raise BadInput(f"{name} is {value}, but 1 or more is needed.")
        if replay < 0 or max_wait_ms < 0 or (ttl is not None and not ttl > 0):
            raise BadInput(
                f"replay is {replay}, max_wait_ms {max_wait_ms} and ttl {ttl}: none of them can be negative."
            )
        self._served = Served(model, example=example, init=init)
        try:
            self._store = open_store(store)
            self._store.ttl, self._store.replay = ttl, replay
            slab = Slab(self._served.initial(), max_sessions)
            self._slab = slab
            chains = self._store.chains and self._served.every_step
            self._line = Line(most=max_pending, max_wait=max_wait_ms / 1e3, chains=chains)
            self._worker = Worker(
                self._served, self._store, self._line, slab=slab, batch=max_batch, limit=max_stored, clock=clock
            )
        except BaseException:
            self._served.close()
            raise
        self._closed = False
        self._driving = Driving(self._worker, self._line, max_wait=max_wait_ms / 1e3)
        self._worker.start(self._driving.pass_on)

    # Inputs.

    def push(self, session: str, x: Any, seq: int | None = None, *, timeout: float | None = None) -> Any:
        """Apply one step, or a piece of any number of steps, and return the model's outputs.

        Args:
            session: Its name.
            x: One step as the model sees it, without batch and time, or steps of that shape one after another.
            seq: The number of this input, counted from 1: a repeated one is answered again and not applied again, a gap
                is an error. None: whatever comes next.
            timeout: Seconds to wait for the answer at most.
        """
        ticket = Ticket(1)
        push = self._push(ticket, session, x, seq)
        if timeout is None:
            self._driving.stand_here([push])
        else:
            self._line.add([push])
        return self._output(_one(ticket.wait(timeout)), x)

    async def apush(self, session: str, x: Any, seq: int | None = None) -> Any:
        """Do as `push`; cancelled before its tick, the input is not applied."""
        return self._output(await self.submit(session, x, seq).outcome(), x)

    def submit(self, session: str, x: Any, seq: int | None = None) -> Push:
        """Let an input stand in line at once, and return it: await its `outcome`, and then read its `seq`.

        For event loops with many inputs under way: no task is made for each. `output` makes tensors of the outcome.
        """
        push = self._push(AsyncTicket(1), session, x, seq)
        self._driving.stand([push])
        return push

    def submit_raw(self, session: str, frames: Sequence[tuple[memoryview, int | None]]) -> list[Push]:
        """Do as `submit` with several inputs, each as the bare bytes of its steps in the model's dtype and its number.

        They are answered together: the outcome of any is there when those of all are.
        """
        ticket = AsyncTicket(len(frames))
        width = self._served.layout.width
        pushes = [
            Push(session, ticket, place, (data, len(data) // width, False, seq))
            for place, (data, seq) in enumerate(frames)
        ]
        self._driving.stand(pushes)
        return pushes

    def output(self, outcome: Output) -> Any:
        """Return what an input was answered with, as `push` returns it."""
        return self._served.output(outcome, _CPU)

    def output_raw(self, outcome: Output) -> bytes | None:
        """Return the same as bare bytes, None where it is more than one tensor."""
        return self._served.raw(outcome)

    def push_many(
        self,
        sessions: Sequence[str],
        xs: Sequence[Any] | Tensor,
        *,
        seqs: Sequence[int | None] | None = None,
        errors: Literal["raise", "return"] = "raise",
    ) -> Any:
        """Apply one input to each of many sessions at once, and return their outputs in that order.

        Inputs in one tensor, `(session, ...)`, are answered in one tensor; those in a list, in a list. Where some fail,
        the others are applied all the same: the first error is raised, or with `errors="return"` a list is returned
        in which each error stands in place of an output.
        """
        if errors not in ("raise", "return"):
            raise BadInput(f"errors is {errors!r}, but it is 'raise' or 'return'.")
        count = len(sessions) if seqs is None else len(seqs)
        if not len(sessions) == len(xs) == count:
            raise BadInput(f"there are {len(sessions)} sessions, {len(xs)} inputs and {count} numbers of inputs.")
        if not len(sessions):
            return []
        ticket = Ticket(len(sessions))
        self._driving.stand_here(self._pushes(ticket, sessions, xs, seqs))
        results = ticket.wait(None)
        if len(ticket.rows) == 1 and ticket.rows[0][1] == len(results) and errors == "raise":
            return self._rebuilt(ticket.rows[0][2], xs)
        for place, count, leaves in ticket.rows:
            results[place : place + count] = [Output(leaves, row, None) for row in range(count)]
        if errors == "raise":
            for result in results:
                if isinstance(result, Exception):
                    raise result
            if isinstance(xs, Tensor):
                return self._stacked(results, xs)
        return [r if isinstance(r, Exception) else self._output(r, x) for r, x in zip(results, xs, strict=True)]

    # The engine itself.

    @property
    def fingerprint(self) -> str:
        """The mark of this model, which every state it makes bears."""
        return self._served.fingerprint

    @property
    def step_shape(self) -> tuple[int, ...]:
        """The shape of one step of one session."""
        return self._served.layout.step_shape

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of inputs."""
        return self._served.layout.dtype

    @property
    def outputs(self) -> list[dict[str, Any]]:
        """Name, dtype and shape of each tensor that a piece is answered with; -1 stands for its steps."""
        return self._served.described()

    @property
    def replay(self) -> int:
        """How many answers of each session are kept."""
        return self._store.replay

    @property
    def hot(self) -> int:
        """How many states are at hand."""
        return len(self._slab)

    @property
    def pending(self) -> int:
        """How many operations wait or are under way."""
        return len(self._line)

    def stats(self) -> Snapshot:
        """Return what the engine has done, in numbers."""
        return self._worker.stats.snapshot()

    def shutdown(self) -> None:
        """Take no more, finish and commit what is under way, and give the model back as it was."""
        self._line.close()
        if self._closed:
            return
        self._closed = True
        self._worker.join()
        self._store.close()
        self._served.close()

    def __enter__(self) -> Engine:
        """Return itself."""
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        """Shut down."""
        self.shutdown()

    def _push(self, ticket: Ticket, session: str, x: Any, seq: int | None, place: int = 0) -> Push:
        piece, alone = self._served.read(x)
        if seq is not None and (isinstance(seq, bool) or not isinstance(seq, int) or seq < 1):
            raise BadInput(f"seq is {seq!r}, but inputs are numbered from 1 on.")
        push = Push(checked(session), ticket, place, (piece.unsqueeze(0), len(piece), alone, seq))
        push.row = 0
        return push

    def _pushes(
        self, ticket: Ticket, sessions: Sequence[str], xs: Sequence[Any] | Tensor, seqs: Sequence[int | None] | None
    ) -> Sequence[Op]:
        if isinstance(xs, Tensor) and set(map(type, sessions)) == {str} and (seqs is None or are_numbers(seqs)):
            source, alone = self._served.read_rows(xs)
            return [Many(list(sessions), ticket, 0, (source, alone, None if seqs is None else list(seqs)))]
        each = enumerate(zip(sessions, xs, seqs or [None] * len(sessions), strict=True))
        return [self._push(ticket, session, x, seq, place) for place, (session, x, seq) in each]

    def _output(self, outcome: Output, x: Any) -> Any:
        """Return an output where its input came from."""
        return self._served.output(outcome, x.device if isinstance(x, Tensor) else _CPU)

    def _stacked(self, outcomes: list[Output], xs: Tensor) -> Any:
        """Return all outputs in one tensor, `(session, ...)`."""
        columns = zip(*([None if leaf is None else leaf[o.row] for leaf in o.leaves] for o in outcomes), strict=True)
        found = [[leaf for leaf in column if leaf is not None] for column in columns]
        return self._rebuilt([torch.stack(column) if column else None for column in found], xs)

    def _rebuilt(self, leaves: list[Tensor | None], xs: Any) -> Any:
        return self._served.rebuild([None if leaf is None else leaf.to(xs.device) for leaf in leaves])

    def _now(self, ask: Callable[[Ticket], Op]) -> Any:
        ticket = Ticket(1)
        self._driving.stand_here([ask(ticket)])
        return _one(ticket.wait(None))

    async def _later(self, ask: Callable[[Ticket], Op]) -> Any:
        ticket = AsyncTicket(1)
        self._driving.stand([ask(ticket)])
        return _one(await ticket.future)


def _one(results: list[Any]) -> Any:
    (result,) = results
    if isinstance(result, Exception):
        raise result
    return result
