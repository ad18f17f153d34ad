"""The engine: many callers, one state each, batched into one model call per tick."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from types import TracebackType
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn

from ..errors import BadInput, SessionLost
from ..state import State
from .arena import Arena
from .futures import AsyncResultFuture, ResultFuture
from .policy import SessionPolicy
from .pushes import GatheredInputs, PushFactory
from .queue import OperationQueue
from .rollout import Migrate, Rollout
from .savepoint import load_sessions, save_sessions
from .session import Session, checked, named, read_import
from .session_operations import Close, Export, Fork, Info, ListNames, Open, OutputRow, Push, Reset, SessionOperation
from .stores import Store, open_store
from .tick import TickRunner
from .trial import prepare
from .worker import EngineStats, Worker

_ENGINE: Any = object()  # stands for the engine itself, where a session could be named


class Engine:
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
    Methods that wait have a twin for coroutines, with an `a` in front of the name: `await engine.apush(session, x)`.
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
        version: int | None = None,
        migrate: Migrate = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """Check that the model can be served, open the store, and start.

        Args:
            model: Any model with recurrent layers for which `hs.check_split` holds.
            store: `memory:`, `sqlite:///path` or `redis://host:port/number`.
            max_batch: The most operations in one tick.
            max_sessions: States held in memory; those of further sessions are in the store alone until needed.
            max_stored: The most sessions in the store; further ones are refused (`Overloaded`).
            max_pending: Operations that may wait at once; further ones are refused.
            max_wait_ms: The longest that an input waits for others to join its tick. It waits only for as many as came
                last time, so a lone caller never waits.
            ttl: Seconds without an input after which a session expires; None: never.
            replay: How many answers are kept of each session, to be given again when an input is repeated.
            example: An input as the model takes it, where none can be made up.
            init: What a session starts from, as in `hs.Carry`.
            version: The model's, a number that rises from one to the next; it is stored with every state.
            migrate: What becomes of sessions of older versions: a function from their State to this model's, by which
                each is moved on at its next input; "drain", which leaves them to workers that still serve theirs; or
                None, which refuses them.
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
        rollout = Rollout(version, migrate)
        self._model = prepare(model, example=example, init=init)
        self._model.fingerprint = rollout.fingerprint(self._model.fingerprint)
        self._pushes = PushFactory(self._model)
        try:
            self._store = open_store(store)
            self._store.ttl, self._store.replay = ttl, replay
            self._arena = Arena(self._model.initial(), max_sessions)
            max_wait, chains = max_wait_ms / 1e3, self._store.chains and self._model.every_step
            self._queue = queue = OperationQueue(max_size=max_pending, max_wait=max_wait, chains=chains)
            limits: dict[str, Any] = {"max_stored": max_stored, "rollout": rollout}
            self._policy = policy = SessionPolicy(self._model, self._store, self._arena, **limits)
            ticks = TickRunner(self._model, self._store, queue, arena=self._arena, policy=policy, clock=clock)
            most = min(max_batch, max_sessions)
            self._worker = Worker(ticks, queue, self._store, max_batch=most, max_wait=max_wait)
            self._gathered = GatheredInputs(self._model, submit=self._worker.submit_async)
            self._worker.gathered = self._gathered
        except BaseException:
            self._model.close()
            raise
        self._closed = False
        self._worker.start()

    # Inputs.

    def push(self, session: str, x: Any, seq: int | None = None, *, timeout: float | None = None) -> Any:
        """Apply one step, or a piece of any number of steps, and return the model's outputs.

        Args:
            session: Its name.
            x: One step without batch and time axes, or several steps stacked along a time axis in front.
            seq: The number of this input, counted from 1: a repeated one is answered again and not applied again, a gap
                is an error. None: the next one.
            timeout: The most seconds to wait for the answer. An input whose turn has not come by then is not applied
                (`DeadlineExceeded`); of one that is under way nobody knows yet (`TimeoutError`).
        """
        future = ResultFuture(1)
        push = self._pushes.one(future, session, x, seq)
        if timeout is None:
            self._worker.submit([push])
        else:
            self._queue.add([push])
        return self._pushes.output(_one(future.wait(timeout)), x)

    async def apush(self, session: str, x: Any, seq: int | None = None, *, timeout: float | None = None) -> Any:
        """Do as `push`; an input that is cancelled before its tick is not applied."""
        gathered = self._gathered.add(session, x, seq) if timeout is None and self._worker.quick else None
        if gathered is None:
            future = AsyncResultFuture(1)
            self._worker.submit_async([self._pushes.one(future, session, x, seq)])
            results = await (future.waiter if timeout is None else future.result(timeout))
        elif type(results := await gathered) is not list:
            return results
        return self._pushes.output(_one(results), x)

    def submit(self, session: str, x: Any, seq: int | None = None) -> Push:
        """Queue an input at once, and return it: await its `outcome`, and then read its `seq`.

        For event loops with many inputs under way: no task is made for each. `output` makes tensors of the outcome.
        """
        push = self._pushes.one(AsyncResultFuture(1), session, x, seq)
        self._worker.submit_async([push])
        return push

    def submit_raw(self, session: str, frames: Sequence[tuple[memoryview, int | None]]) -> list[Push]:
        """Do as `submit` with several inputs, each as the raw bytes of its steps in the model's dtype and its number.

        They are answered together: no outcome is there before all are.
        """
        pushes = self._pushes.raw(AsyncResultFuture(len(frames)), session, frames)
        self._worker.submit_async(pushes)
        return pushes

    def output(self, outcome: OutputRow) -> Any:
        """Return the outcome of an input as `push` returns it."""
        return self._pushes.output(outcome)

    def output_raw(self, outcome: OutputRow) -> bytes | None:
        """Return the same as raw bytes, None where it is more than one tensor."""
        return self._model.raw(outcome)

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
        the others are applied all the same: the first error is raised, or with `errors="return"` a list is returned in
        which each error takes the place of an output.
        """
        if errors not in ("raise", "return"):
            raise BadInput(f"errors is {errors!r}, but it is 'raise' or 'return'.")
        count = len(sessions) if seqs is None else len(seqs)
        if not len(sessions) == len(xs) == count:
            raise BadInput(f"there are {len(sessions)} sessions, {len(xs)} inputs and {count} numbers of inputs.")
        if not len(sessions):
            return []
        future = ResultFuture(len(sessions))
        self._worker.submit(self._pushes.many(future, sessions, xs, seqs))
        future.wait(None)
        return self._pushes.outputs(future, xs, raises=errors == "raise")

    # Sessions.

    def open(self, session: str | None = None, *, exist_ok: bool = False) -> str:
        """Begin a session and return its name, made up where none is given."""
        return cast(str, self._run(lambda future: Open(named(session), future, exist_ok=exist_ok)))

    async def aopen(self, session: str | None = None, *, exist_ok: bool = False) -> str:
        """Do as `open`."""
        return cast(str, await self._arun(lambda future: Open(named(session), future, exist_ok=exist_ok)))

    def close(self, session: str = _ENGINE) -> None:
        """End a session and delete its state. Without a session, stop the engine itself, as `shutdown` does."""
        if session is _ENGINE:
            self.shutdown()
        else:
            self._run(lambda future: Close(checked(session), future))

    async def aclose(self, session: str) -> None:
        """Do as `close` with a session."""
        await self._arun(lambda future: Close(checked(session), future))

    def reset(self, session: str) -> None:
        """Put a session back in the initial state; the numbering of its inputs continues."""
        self._run(lambda future: Reset(checked(session), future))

    async def areset(self, session: str) -> None:
        """Do as `reset`."""
        await self._arun(lambda future: Reset(checked(session), future))

    def fork(self, session: str, target: str | None = None) -> str:
        """Begin another session in the state of this one, and return its name."""
        return cast(str, self._run(lambda future: Fork(checked(session), future, target=named(target))))

    async def afork(self, session: str, target: str | None = None) -> str:
        """Do as `fork`."""
        return cast(str, await self._arun(lambda future: Fork(checked(session), future, target=named(target))))

    def export(self, session: str) -> bytes:
        """Return a session's state as a safetensors file, with its model and the number of its last input."""
        return cast(bytes, self._run(lambda future: Export(checked(session), future)))

    async def aexport(self, session: str) -> bytes:
        """Do as `export`."""
        return cast(bytes, await self._arun(lambda future: Export(checked(session), future)))

    def import_(self, session: str, state: bytes | State, *, any_model: bool = False) -> str:
        """Put a session, which is begun if it does not exist, where an exported one was.

        Args:
            session: Its name.
            state: What `export` returned, or a State of one row, which then counts as after no input.
            any_model: Whether to accept a file that names no model, or another one.
        """
        options: dict[str, Any] = {"model": self._model, "any_model": any_model}
        return cast(str, self._run(lambda future: read_import(session, future, state, **options)))

    async def aimport_(self, session: str, state: bytes | State, *, any_model: bool = False) -> str:
        """Do as `import_`."""
        options: dict[str, Any] = {"model": self._model, "any_model": any_model}
        return cast(str, await self._arun(lambda future: read_import(session, future, state, **options)))

    def info(self, session: str) -> Session:
        """Return how far a session has come."""
        return cast(Session, self._run(lambda future: Info(checked(session), future)))

    async def ainfo(self, session: str) -> Session:
        """Do as `info`."""
        return cast(Session, await self._arun(lambda future: Info(checked(session), future)))

    def sessions(self, prefix: str = "", *, after: str = "", limit: int = 1_000_000) -> list[str]:
        """Return up to `limit` names of sessions in order: those that begin with `prefix` and come after `after`."""
        return cast("list[str]", self._run(lambda future: ListNames(prefix, future, after=after, limit=limit)))

    async def asessions(self, prefix: str = "", *, after: str = "", limit: int = 1_000_000) -> list[str]:
        """Do as `sessions`."""
        return cast("list[str]", await self._arun(lambda future: ListNames(prefix, future, after=after, limit=limit)))

    # The engine itself.

    @property
    def fingerprint(self) -> str:
        """The fingerprint of the model, which is stored with every state."""
        return self._model.fingerprint

    @property
    def step_shape(self) -> tuple[int, ...]:
        """The shape of one step of one session."""
        return self._model.layout.step_shape

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of inputs."""
        return self._model.layout.dtype

    @property
    def outputs(self) -> list[dict[str, Any]]:
        """Name, dtype and shape of each tensor of the output; -1 stands for the number of steps."""
        return self._model.described()

    @property
    def replay(self) -> int:
        """How many answers of each session are kept."""
        return self._store.replay

    @property
    def hot(self) -> int:
        """How many sessions have their state in memory."""
        return len(self._arena)

    @property
    def pending(self) -> int:
        """How many operations wait or are in a tick."""
        return len(self._queue)

    def stats(self) -> EngineStats:
        """Return counts and latencies since the start."""
        return self._worker.counter.snapshot()

    def save(self, path: str | os.PathLike[str]) -> int:
        """Write all sessions with their kept answers to a file, a savepoint, and return how many there are.

        No input is applied here meanwhile. Where other workers write to the same store, each session is taken between
        two of its inputs, but not all at the same instant.
        """
        return self._worker.between_ticks(lambda: save_sessions(self._store, self._model, path))

    def load(self, path: str | os.PathLike[str], *, replace: bool = False) -> int:
        """Put all sessions of a savepoint into the store, and return how many there are.

        Sessions that exist already are an error, and nothing is changed; with `replace` they are set back to it.
        """
        options: dict[str, Any] = {"replace": replace, "max_stored": self._policy.max_stored}

        def work() -> int:
            self._arena.clear()
            return len(load_sessions(path, self._store, self._model, **options))

        return self._worker.between_ticks(work)

    def check(self) -> None:
        """Raise `StoreFailed` where the store cannot be read or written now."""
        self._worker.check_store()

    def drain(self) -> None:
        """Begin no more sessions here, and go on with those that there are: another version is to take over."""
        self._policy.draining = True

    def versions(self) -> dict[str, int]:
        """Return how many sessions there are of each fingerprint, while others may begin and end."""
        counts: Counter[str] = Counter()
        for name in self.sessions():
            with suppress(SessionLost):
                counts[self.info(name).fingerprint] += 1
        return dict(counts)

    def shutdown(self) -> None:
        """Refuse new operations, finish and commit what is under way, and give the model back as it was."""
        if self._closed:
            return
        self._closed = True
        self._gathered.close(self._queue.add)
        self._queue.close()
        self._worker.join()
        self._store.close()
        self._model.close()

    def __enter__(self) -> Engine:
        """Return the engine."""
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        """Shut down."""
        self.shutdown()

    def _run(self, make: Callable[[ResultFuture], SessionOperation]) -> Any:
        """Queue an operation and wait for its result."""
        future = ResultFuture(1)
        self._worker.submit([make(future)])
        return _one(future.wait(None))

    async def _arun(self, make: Callable[[ResultFuture], SessionOperation]) -> Any:
        """Queue an operation and await its result."""
        future = AsyncResultFuture(1)
        self._worker.submit_async([make(future)])
        return _one(await future.waiter)


def _one(results: list[Any]) -> Any:
    (result,) = results
    if isinstance(result, Exception):
        raise result
    return result
