"""The gateway that all routes go through: the engine, who is calling, and how much they may ask."""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Annotated, Any, TypeVar

from fastapi import Depends, HTTPException, Request, WebSocket
from starlette.concurrency import run_in_threadpool

from ...errors import BadInput, SessionExists, SessionLost
from ..engine import Engine
from ..wire import named_tensors
from .callers import Caller, Given, RateLimit, Tokens, open_tokens
from .guard import SLASH

_T = TypeVar("_T")
_LONGEST_NAME = 256
_BYTES_A_NUMBER = 32  # of JSON, at the most generous
_JSON_EXTRA = 64 * 1024  # bytes of JSON around the numbers
_READY_IN = 2.0  # seconds in which a store that is well says so
_BIG = 64 * 1024  # bytes or numbers from which on work is done in another thread


@dataclass(frozen=True, slots=True)
class Limits:
    """What a caller may use at most."""

    body: int = 16 * 1024 * 1024  # bytes of one request or frame
    json: int = 1024 * 1024  # of these, as JSON
    steps: int = 4096  # in one input
    new_sessions: float = 100.0  # a second, for each caller; as many may come at once
    inputs: float = math.inf  # a second, for each caller
    streams: int = 1024  # WebSockets open at once, for each caller
    window: int = 8  # inputs under way on one WebSocket

    def __post_init__(self) -> None:
        """Refuse what would let nothing through."""
        for name in self.__dataclass_fields__:
            if not getattr(self, name) > 0:
                raise BadInput(f"the limit {name} is {getattr(self, name)}, but a number above 0 is needed.")


class Gateway:
    """An engine behind tokens and limits. A caller's sessions have its name in front, out of reach of all others."""

    def __init__(self, engine: Engine, *, tokens: Given | Tokens = None, limits: Limits | None = None) -> None:
        """Serve `engine` to callers with one of the `tokens`, to everybody where that is None."""
        self.engine = engine
        self.limits = limits or Limits()
        self.draining = False
        self._reading: set[asyncio.Task[Any]] = set()  # requests that have not all been sent
        self.tokens = open_tokens(tokens)
        self._new_sessions, self._inputs = RateLimit(), RateLimit()
        self._streams: Counter[str] = Counter()
        self._ready: asyncio.Future[None] | None = None  # the look at the store that is under way
        numbers = self.limits.steps * math.prod(engine.step_shape)
        self.most_json = min(self.limits.body, self.limits.json, numbers * _BYTES_A_NUMBER + _JSON_EXTRA)

    def caller(self, connection: Request | WebSocket) -> Caller:
        """Return the caller, or refuse one without a valid token."""
        found = self.tokens.caller(_authorization(connection))
        if found is None:
            raise HTTPException(
                401, "a bearer token is needed that this server knows.", headers={"www-authenticate": "Bearer"}
            )
        connection.state.caller = found.name
        return found

    def knows(self, caller: Caller, connection: WebSocket) -> bool:
        """Return whether the token that a connection began with is still that of this caller."""
        found = self.tokens.caller(_authorization(connection))
        return found is not None and found.name == caller.name

    def key(self, caller: Caller, session: str) -> str:
        """Return the engine's name for a caller's session."""
        session = session.replace(SLASH, "/")
        if not 0 < len(session) <= _LONGEST_NAME or not session.isprintable() or session in (".", ".."):
            raise BadInput(f"the name of a session has 1 to {_LONGEST_NAME} printable characters, and is not . or ..")
        return f"{caller.name}:{session}" if caller.name else session

    def name(self, caller: Caller, key: str) -> str:
        """Return the caller's name for a session of the engine."""
        return key.removeprefix(f"{caller.name}:") if caller.name else key

    async def begin(self, caller: Caller, key: str, *, exist_ok: bool = False) -> None:
        """Begin a session, or with `exist_ok` go on with the one that is there; only a new one counts as new."""
        if exist_ok and await self.exists(key):
            return
        with self.new_session(caller):
            await self.engine.aopen(key, exist_ok=exist_ok)

    async def exists(self, key: str, *, damaged: bool = False) -> bool:
        """Return whether a session is there; raise where it cannot be continued, also for damage unless `damaged`."""
        try:
            await self.engine.ainfo(key)
        except SessionLost as error:
            if error.reason in ("unknown", "expired"):
                return False
            if error.reason != "damaged" or not damaged:
                raise
        return True

    @contextmanager
    def new_session(self, caller: Caller) -> Iterator[None]:
        """Count a new session that is begun within, or refuse it where there were too many just now."""
        rate = caller.new_sessions or self.limits.new_sessions
        if wait := self._new_sessions.take(caller.name, rate):
            raise _too_many(f"more than {rate:g} new sessions a second", wait)
        try:
            yield
        except SessionExists:
            self._new_sessions.give_back(caller.name)
            raise

    def admit_inputs(self, caller: Caller, count: int = 1) -> None:
        """Count inputs of a caller, or refuse them where there were too many just now."""
        if wait := self.input_wait(caller, count):
            raise _too_many(f"more than {caller.inputs or self.limits.inputs:g} inputs a second", wait)

    def input_wait(self, caller: Caller, count: int = 1) -> float:
        """Count inputs of a caller and return 0, or the seconds until they may come."""
        rate = caller.inputs or self.limits.inputs
        return 0.0 if rate == math.inf else self._inputs.take(caller.name, rate, count)

    @contextmanager
    def stream_of(self, caller: Caller) -> Iterator[None]:
        """Count a WebSocket while it is open, or refuse it where the caller has too many."""
        most = caller.streams or self.limits.streams
        if self._streams[caller.name] >= most:
            raise _too_many(f"more than {most:g} streams at once", 1.0)
        self._streams[caller.name] += 1
        try:
            yield
        finally:
            self._streams[caller.name] -= 1

    def check_steps(self, x: Any) -> None:
        """Refuse an input of too many steps."""
        shape = self.engine.step_shape
        steps = x.shape[0] if x.dim() > len(shape) else 1
        if steps > self.limits.steps:
            raise HTTPException(413, f"the input has {steps} steps, and at most {self.limits.steps} are taken at once.")

    def check_json(self, size: int) -> None:
        """Refuse a JSON text, before it is parsed, that is too long, or longer than any input can be."""
        if size > self.most_json:
            raise HTTPException(
                413,
                f"the JSON has {size} bytes, and at most {self.most_json} are taken. Send fewer steps, or send them as "
                f"bytes: safetensors, KServe's binary data, a binary frame.",
            )

    async def ready(self) -> None:
        """Raise where inputs are not taken: the server is ending, or its store does not answer."""
        if self.draining:
            raise HTTPException(503, "the server is shutting down.")
        if self._ready is None or self._ready.done():
            self._ready = asyncio.ensure_future(run_in_threadpool(self.engine.check))
            self._ready.add_done_callback(lambda done: done.cancelled() or done.exception())  # else it would be logged
        answered, _ = await asyncio.wait({self._ready}, timeout=_READY_IN)
        if not answered:
            raise HTTPException(503, f"the store has not answered for {_READY_IN:g} s.")
        if (error := self._ready.exception()) is not None:
            raise HTTPException(503, str(error))

    async def body_of(self, request: Request, *, json: bool) -> bytes:
        """Read a request's body, or refuse it where it has more bytes than are taken, or as JSON more than of that."""
        most = self.most_json if json else self.limits.body
        declared = request.headers.get("content-length", "")
        if declared.isascii() and declared.isdecimal():
            self._check_body(int(declared), most, json=json)
        pieces, size = [], 0
        task = asyncio.current_task()
        assert task is not None
        self._reading.add(task)
        try:
            async for piece in request.stream():
                size += len(piece)
                self._check_body(size, most, json=json)
                pieces.append(piece)
        except asyncio.CancelledError:
            if not self.draining:
                raise
            raise HTTPException(503, "the server is shutting down.") from None
        finally:
            self._reading.discard(task)
        return b"".join(pieces)

    def drain(self) -> None:
        """Take no more: a request that has not all been sent is answered at once, and does not hold up the end."""
        self.draining = True
        for task in self._reading:
            task.cancel()

    def _check_body(self, size: int, most: int, *, json: bool) -> None:
        if json:
            self.check_json(size)
        elif size > most:
            raise HTTPException(413, f"the body has {size} bytes or more, and at most {most} are taken.")


async def off_loop(size: int, work: Callable[..., _T], *args: Any) -> _T:
    """Return what `work` returns; in another thread where there is so much to do that others would wait for it."""
    return await run_in_threadpool(work, *args) if size > _BIG else work(*args)


def numbers_in(output: Any) -> int:
    """Return how many numbers there are in an output."""
    return sum(tensor.numel() for tensor in named_tensors(output).values())


def gateway_of(request: Request) -> Gateway:
    """Return the gateway of this application."""
    gateway: Gateway = request.app.state.gateway
    return gateway


def caller_of(request: Request) -> Caller:
    """Return the caller."""
    return gateway_of(request).caller(request)


# Parameters of routes.
CurrentGateway = Annotated[Gateway, Depends(gateway_of)]
CurrentCaller = Annotated[Caller, Depends(caller_of)]


def _too_many(what: str, seconds: float) -> HTTPException:
    return HTTPException(429, f"{what}: try again in a moment.", headers={"retry-after": str(math.ceil(seconds))})


def _authorization(connection: Request | WebSocket) -> str | None:
    """Return the authorization header; browsers cannot set it for WebSockets, and send a protocol `bearer.TOKEN`."""
    header: str | None = connection.headers.get("authorization")
    if header is None and isinstance(connection, WebSocket):
        for protocol in connection.scope.get("subprotocols", []):
            if protocol.startswith("bearer."):
                return f"Bearer {protocol.removeprefix('bearer.')}"
    return header
