"""Errors as HTTP answers: their status, and the text that the client gets."""

from __future__ import annotations

import re
from typing import Any

from fastapi import Request
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.requests import HTTPConnection

from ...errors import (
    DeadlineExceeded,
    HiddenStateError,
    ModelFailed,
    Overloaded,
    SequenceGap,
    ServeError,
    SessionExists,
    SessionLost,
    StoreFailed,
)

_LOST = {"unknown": 404, "expired": 410, "damaged": 410, "model": 409}
_BUSY, _LATE = 503, 504


def status_of(error: HiddenStateError) -> int:
    """Return the HTTP status for an error."""
    match error:
        case SessionLost():
            return _LOST.get(error.reason, 404)
        case SessionExists() | SequenceGap():
            return 409
        case ModelFailed():
            return 422
        case DeadlineExceeded():
            return _LATE
        case Overloaded() | StoreFailed() | ServeError():
            return _BUSY
    return 400


def facts_of(error: HiddenStateError, connection: HTTPConnection) -> dict[str, Any]:
    """Return an error as JSON values, with the session named as the client names it."""
    caller = getattr(connection.state, "caller", "")
    # Names of sessions are quoted in messages, and the caller's stands in front of them.
    message = re.sub(f"(?<=['\"]){re.escape(caller)}:", "", str(error)) if caller else str(error)
    facts: dict[str, Any] = {"kind": type(error).__name__, "message": message}
    if isinstance(error, SessionLost):
        facts["reason"] = error.reason
    if isinstance(error, SequenceGap):
        facts["seq"] = error.seq
    return facts


async def answer_error(request: Request, error: Exception) -> JSONResponse:
    """Answer one of the library's errors."""
    assert isinstance(error, HiddenStateError)
    status = status_of(error)
    if request.url.path.startswith("/v2/"):
        return JSONResponse({"error": facts_of(error, request)["message"]}, status)
    headers = {"retry-after": "1"} if status == _BUSY else None
    return JSONResponse({"error": facts_of(error, request)}, status, headers)


async def answer_late(request: Request, error: Exception) -> JSONResponse:
    """Answer that there was no answer in time: whether the input is applied, nobody knows yet."""
    if request.url.path.startswith("/v2/"):
        return JSONResponse({"error": str(error)}, _LATE)
    return JSONResponse({"error": {"kind": "TimeoutError", "message": str(error)}}, _LATE)


async def answer_http_error(request: Request, error: Exception) -> JSONResponse:
    """Answer an error of HTTP itself in the same form."""
    assert isinstance(error, HTTPException)
    if request.url.path.startswith("/v2/"):
        return JSONResponse({"error": error.detail}, error.status_code)
    facts = {"kind": "HTTP", "message": error.detail}
    return JSONResponse({"error": facts}, error.status_code, error.headers)
