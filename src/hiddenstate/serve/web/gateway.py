"""The gateway that all routes go through: the engine, who is calling, and how much they may ask."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from fastapi import Depends, HTTPException, Request, WebSocket

from ...errors import BadInput
from ..engine import Engine

_LONGEST_NAME = 256


@dataclass(frozen=True, slots=True)
class Limits:
    """What a caller may use at most."""

    body: int = 16 * 1024 * 1024  # bytes of one request or frame
    steps: int = 4096  # in one input
    new_sessions: float = 100.0  # a second, for each token; as many may come at once
    window: int = 8  # inputs under way on one WebSocket


class Tokens:
    """The names of callers by bearer token. Without tokens, everybody is the same nameless caller."""

    def __init__(self, tokens: Mapping[str, str] | Sequence[str] | None) -> None:
        """Take `{name: token}`, or tokens alone, each of which gives its caller a hash for a name."""
        if isinstance(tokens, str):
            raise BadInput("tokens is one string, but a mapping of names to tokens, or a list of tokens, is needed.")
        pairs = tokens.items() if isinstance(tokens, Mapping) else [(_digest(t).hex()[:16], t) for t in tokens or []]
        self._names = {_digest(token): name for name, token in pairs}
        if any(not name or ":" in name for name in self._names.values()) or b"" in self._names:
            raise BadInput("the name of a caller is a string without colons.")
        self._needed = tokens is not None

    def caller(self, authorization: str | None) -> str | None:
        """Return the caller's name, empty where no token is needed, None where the token is wrong."""
        if not self._needed:
            return ""
        kind, _, token = (authorization or "").partition(" ")
        # By its hash, so that the time the lookup takes reveals nothing about the token.
        return self._names.get(_digest(token.strip())) if kind.lower() == "bearer" else None


def _digest(token: str) -> bytes:
    return hashlib.sha256(token.encode("utf-8", "surrogateescape")).digest()


class RateLimit:
    """A token bucket for each caller, filled at a steady rate."""

    def __init__(self, a_second: float, *, clock: Callable[[], float] = time.monotonic) -> None:
        """Let `a_second` through for each caller, and no more than that at once."""
        self._rate, self._clock = a_second, clock
        self._buckets: dict[str, tuple[float, float]] = {}  # caller -> what is left, when

    def take(self, caller: str) -> bool:
        """Return whether one more may come now, and count it."""
        now = self._clock()
        most = max(1.0, self._rate)
        left, then = self._buckets.get(caller, (most, now))
        left = min(most, left + (now - then) * self._rate)
        self._buckets[caller] = (left - 1 if left >= 1 else left, now)
        return left >= 1


class Gateway:
    """An engine behind tokens and limits. A caller's sessions have its name in front, out of reach of all others."""

    def __init__(
        self, engine: Engine, *, tokens: Mapping[str, str] | Sequence[str] | None = None, limits: Limits | None = None
    ) -> None:
        """Serve `engine` to callers with one of the `tokens`, to everybody where that is None."""
        self.engine = engine
        self.limits = limits or Limits()
        self.draining = False
        self._tokens = Tokens(tokens)
        self._rate = RateLimit(self.limits.new_sessions)

    def caller(self, connection: Request | WebSocket) -> str:
        """Return the name of the caller, or refuse one without a valid token."""
        name = self._tokens.caller(_authorization(connection))
        if name is None:
            raise HTTPException(
                401, "a bearer token is needed that this server knows.", headers={"www-authenticate": "Bearer"}
            )
        connection.state.caller = name
        return name

    def key(self, caller: str, session: str) -> str:
        """Return the engine's name for a caller's session."""
        if not 0 < len(session) <= _LONGEST_NAME or not session.isprintable():
            raise BadInput(f"the name of a session has 1 to {_LONGEST_NAME} printable characters.")
        return f"{caller}:{session}" if caller else session

    def name(self, caller: str, key: str) -> str:
        """Return the caller's name for a session of the engine."""
        return key.removeprefix(f"{caller}:") if caller else key

    def admit_new(self, caller: str) -> None:
        """Count a new session of a caller, or refuse it where there were too many just now."""
        if not self._rate.take(caller):
            raise HTTPException(
                429, f"more than {self.limits.new_sessions:g} new sessions a second.", headers={"retry-after": "1"}
            )

    def check_steps(self, x: Any) -> None:
        """Refuse an input of too many steps."""
        shape = self.engine.step_shape
        steps = x.shape[0] if x.dim() > len(shape) else 1
        if steps > self.limits.steps:
            raise HTTPException(413, f"the input has {steps} steps, and at most {self.limits.steps} are taken at once.")


def gateway_of(request: Request) -> Gateway:
    """Return the gateway of this application."""
    gateway: Gateway = request.app.state.gateway
    return gateway


def caller_of(request: Request) -> str:
    """Return the name of the caller."""
    return gateway_of(request).caller(request)


# Parameters of routes.
CurrentGateway = Annotated[Gateway, Depends(gateway_of)]
CurrentCaller = Annotated[str, Depends(caller_of)]


async def body_of(request: Request, most: int) -> bytes:
    """Read a request's body, or refuse it where it has more than `most` bytes."""
    declared = request.headers.get("content-length", "")
    if declared.isdigit() and int(declared) > most:
        raise HTTPException(413, f"the body has {declared} bytes, and at most {most} are taken.")
    pieces, size = [], 0
    async for piece in request.stream():
        size += len(piece)
        if size > most:
            raise HTTPException(413, f"the body has more than {most} bytes.")
        pieces.append(piece)
    return b"".join(pieces)


def _authorization(connection: Request | WebSocket) -> str | None:
    """Return the authorization header; browsers cannot set it for WebSockets, and send a protocol `bearer.TOKEN`."""
    header: str | None = connection.headers.get("authorization")
    if header is None and isinstance(connection, WebSocket):
        for protocol in connection.scope.get("subprotocols", []):
            if protocol.startswith("bearer."):
                return f"Bearer {protocol.removeprefix('bearer.')}"
    return header
