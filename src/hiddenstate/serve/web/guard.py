"""Checks before a request reaches its route: its origin, the session it names, and its size."""

from __future__ import annotations

import ipaddress
import json
from collections.abc import Awaitable, Callable, Collection, MutableMapping
from typing import Any, TypeAlias
from urllib.parse import SplitResult, unquote_to_bytes, urlsplit

from starlette.exceptions import HTTPException

from ...errors import BadInput

_Scope: TypeAlias = "MutableMapping[str, Any]"
_Receive: TypeAlias = "Callable[[], Awaitable[MutableMapping[str, Any]]]"
_Send: TypeAlias = "Callable[[MutableMapping[str, Any]], Awaitable[None]]"

SLASH = "\0"  # stands for a slash in the name of a session, between here and `Gateway.key`
_SESSIONS = "/v1/sessions/"
_SMALL = 64 * 1024  # bytes of a body that is not a tensor
_LARGE = ("/steps", "/state", "/infer")  # how addresses end whose bodies are tensors, which their routes limit


class Refusal(Exception):
    """A request that goes no further."""

    def __init__(self, status: int, kind: str, message: str) -> None:
        """Answer it so."""
        super().__init__(message)
        self.status, self.kind = status, kind


class Guard:
    """An ASGI application around another one, which refuses what a web page of somebody else might send.

    A page that a browser shows can send requests anywhere: its `Origin` says whose page it is. And a name that it owns
    can be made to lead here: then `Host` has that name. Both are looked at where no token is needed to come in.
    """

    def __init__(self, inner: Any, *, hosts: Collection[str] | None, origins: Collection[str]) -> None:
        """Let in requests to `hosts` (None: any; an address in numbers always), from their own pages and `origins`."""
        self._inner, self._origins = inner, {origin.rstrip("/").lower() for origin in origins}
        self._hosts = None if hosts is None or "*" in hosts else {host.lower() for host in hosts}

    def __call__(self, scope: _Scope, receive: _Receive, send: _Send) -> Awaitable[None]:
        """Pass a request on, or refuse it; no coroutine of its own, since it would be resumed with every frame."""
        if scope["type"] in ("http", "websocket"):
            headers = {name.lower(): value.decode("latin-1") for name, value in scope["headers"]}
            try:
                self._check_host(headers.get(b"host"))
                self._check_origin(headers.get(b"origin"), headers.get(b"host", ""))
                _name_session(scope)
                if scope["type"] == "http" and not scope["path"].endswith(_LARGE):
                    receive = _limited(receive, headers.get(b"content-length", ""))
            except Refusal as refusal:
                return _refuse(scope, receive, send, refusal)
        passed: Awaitable[None] = self._inner(scope, receive, send)
        return passed

    def _check_host(self, host: str | None) -> None:
        if host is None:  # HTTP/1.0, as of a probe: browsers always say it
            return
        name = _split(f"//{host}").hostname or ""
        if self._hosts is None or name in self._hosts or name == "localhost" or _is_address(name):
            return
        raise Refusal(
            421,
            "HTTP",
            f"this server does not answer to the name {name[:80]!r}, since a page of somebody else might have sent "
            f"this by it. Use its address, let it answer to that name (--allow-host), or let callers have tokens.",
        )

    def _check_origin(self, origin: str | None, host: str) -> None:
        if origin is None or "*" in self._origins or origin.lower() in self._origins:
            return
        if _split(origin).netloc.lower() != host.lower() or not host:
            raise Refusal(
                403,
                "HTTP",
                f"the page at {origin[:80]} may not talk to this server. To let it: --allow-origin {origin[:80]}.",
            )


def check_allowed(hosts: Collection[str] | None, origins: Collection[str]) -> None:
    """Refuse names and pages to be let in that no request could ever have."""
    for origin in origins:
        scheme, _, host = origin.rstrip("/").partition("://")
        if origin != "*" and (not scheme or not host or set(host) & set("/ *")):
            raise BadInput(f"the page to allow is {origin!r}, but its origin is needed, as https://example.org:8443.")
    for name in hosts or ():
        if name != "*" and (not name or (set(name) & set("/:@* ") and not _is_address(name.strip("[]")))):
            raise BadInput(f"the name to allow is {name!r}, but a name alone is needed, as served.example.org.")


def _split(address: str) -> SplitResult:
    try:
        return urlsplit(address)
    except ValueError as error:  # as of a bracket that is never closed
        raise Refusal(400, "HTTP", f"{address[:80]!r} is no address: {error}.") from None


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _name_session(scope: _Scope) -> None:
    """Read the name of a session from the address as it was sent: decoded, a slash in it would be one of the path."""
    raw = scope.get("raw_path")
    if raw is None or not scope["path"].startswith(_SESSIONS):
        return
    sent = raw.partition(b"?")[0].split(b"/")[3:]  # after "", "v1" and "sessions"
    try:
        name, *rest = (unquote_to_bytes(part).decode() for part in sent)
    except (UnicodeDecodeError, ValueError):
        raise Refusal(400, "BadInput", "the address is not UTF-8, so it names no session.") from None
    if SLASH in name:
        raise Refusal(400, "BadInput", "the name of a session has printable characters only.")
    scope["path"] = _SESSIONS + "/".join([name.replace("/", SLASH), *rest])


def _limited(receive: _Receive, declared: str) -> _Receive:
    """Return `receive` with a limit on the bytes of the body."""
    if declared.isascii() and declared.isdecimal() and int(declared) > _SMALL:
        raise Refusal(413, "HTTP", f"the body has {declared} bytes, and at most {_SMALL} are taken here.")
    size = 0

    async def limited() -> MutableMapping[str, Any]:
        nonlocal size
        message = await receive()
        size += len(message.get("body", b""))
        if size > _SMALL:  # as the routes' own framework knows it, within which this is raised
            raise HTTPException(413, f"the body has more than the {_SMALL} bytes that are taken here.")
        return message

    return limited


async def _refuse(scope: _Scope, receive: _Receive, send: _Send, refusal: Refusal) -> None:
    if scope["type"] == "websocket":
        await receive()
        await send({"type": "websocket.close", "code": 4000 + refusal.status, "reason": str(refusal)[:120]})
        return
    facts = {"kind": refusal.kind, "message": str(refusal)}
    body = json.dumps({"error": str(refusal) if scope["path"].startswith("/v2/") else facts}).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
    headers.append((b"connection", b"close"))  # what is left of its body is not read
    await send({"type": "http.response.start", "status": refusal.status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
