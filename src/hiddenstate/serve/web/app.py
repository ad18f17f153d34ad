"""The ASGI application: all routes, error handlers and the live page, around one engine."""

from __future__ import annotations

from collections.abc import AsyncIterator, Collection
from contextlib import asynccontextmanager
from importlib.resources import files

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from fastapi.middleware.cors import CORSMiddleware
from fastapi.responses import HTMLResponse, JSONResponse
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import Request

from ...errors import HiddenStateError
from ..engine import Engine
from . import kserve, metrics, sessions, stream
from .callers import Given, Tokens
from .gateway import Gateway, Limits
from .guard import Guard, check_allowed
from .http_errors import answer_error, answer_http_error, answer_late


def make_app(
    engine: Engine,
    *,
    tokens: Given | Tokens = None,
    limits: Limits | None = None,
    hosts: Collection[str] | None = None,
    origins: Collection[str] = (),
) -> FastAPI:
    """Return an ASGI application that serves `engine` and shuts it down, all inputs committed, when it ends.

    It answers to the names in `hosts`, where these are None to any with tokens and to local ones without; to pages of
    its own, and of `origins`.
    """
    check_allowed(hosts, origins)
    gateway = Gateway(engine, tokens=tokens, limits=limits)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        yield
        gateway.drain()
        await run_in_threadpool(engine.shutdown)

    app = FastAPI(
        title="hiddenstate", summary="One state for each caller, batched and durable.", version="1", lifespan=lifespan
    )
    app.state.gateway = gateway
    if origins:
        verbs, headers = ["GET", "POST", "PUT", "DELETE"], ["authorization", "content-type"]
        seen = ["x-seq", "inference-header-content-length"]
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(origins),
            allow_methods=verbs,
            allow_headers=headers,
            expose_headers=seen,
        )
    local = [] if hosts is None and not gateway.tokens.needed else hosts
    app.add_middleware(Guard, hosts=local, origins=origins)
    for part in (sessions, kserve, metrics, stream):
        app.include_router(part.router)
    app.add_exception_handler(HiddenStateError, answer_error)
    app.add_exception_handler(TimeoutError, answer_late)
    app.add_exception_handler(HTTPException, answer_http_error)
    app.add_exception_handler(RequestValidationError, _invalid)

    content = files("hiddenstate.serve").joinpath("page.html").read_text(encoding="utf-8")

    @app.get("/", response_class=HTMLResponse, include_in_schema=False)
    async def page() -> HTMLResponse:
        # The page needs nothing from elsewhere, and so may fetch nothing from elsewhere.
        policy = "default-src 'self'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data:"
        return HTMLResponse(content, headers={"content-security-policy": policy})

    return app


async def _invalid(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    message = f"{'.'.join(map(str, first['loc']))}: {first['msg']}"
    return JSONResponse({"error": {"kind": "BadInput", "message": message}}, 400)
