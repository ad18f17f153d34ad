"""Who may ask, and how much of it."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from fastapi import HTTPException, Request, WebSocket

from ...errors import BadInput


@dataclass(frozen=True, slots=True)
class Limits:
    """What a caller may use up at most."""

    body: int = 16 * 1024 * 1024  # bytes of one request or frame
    steps: int = 4096  # in one input
    new_sessions: float = 100.0  # a second, for each token; as many may come at once
    window: int = 8  # inputs under way on one WebSocket


class Tokens:
    """Names of callers by bearer token. Where there are none, everybody is the same nameless caller."""

    def __init__(self, tokens: Mapping[str, str] | Sequence[str] | None) -> None:
        """Take `{name: token}`, or mere tokens, whose callers are then named by a hash of theirs."""
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
        # Found by its hash, so how long the search takes tells nothing about the token.
        return self._names.get(_digest(token.strip())) if kind.lower() == "bearer" else None


def _digest(token: str) -> bytes:
    return hashlib.sha256(token.encode("utf-8", "surrogateescape")).digest()


class Rate:
    """A bucket for each caller, filled at a steady rate."""

    def __init__(self, a_second: float, *, clock: Callable[[], float] = time.monotonic) -> None:
        """Let `a_second` through for each caller, as many at once at most."""
        self._rate, self._clock = a_second, clock
        self._buckets: dict[str, tuple[float, float]] = {}  # caller -> what is left, when

    def take(self, caller: str) -> bool:
        """Say whether one more may come now."""
        now = self._clock()
        most = max(1.0, self._rate)
        left, then = self._buckets.get(caller, (most, now))
        left = min(most, left + (now - then) * self._rate)
        self._buckets[caller] = (left - 1 if left >= 1 else left, now)
        return left >= 1


async def body_of(request: Request, most: int) -> bytes:
    """Read a body, but not more than `most` bytes of it."""
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


def authorization_of(connection: Request | WebSocket) -> str | None:
    """Return the header, or for browsers' WebSockets, which cannot set it, the protocol `bearer.TOKEN`."""
    header: str | None = connection.headers.get("authorization")
    if header is None and isinstance(connection, WebSocket):
        for protocol in connection.scope.get("subprotocols", []):
            if protocol.startswith("bearer."):
                return f"Bearer {protocol.removeprefix('bearer.')}"
    return header
