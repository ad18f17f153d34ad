"""An engine as a web server: `app` returns the ASGI application, `run` serves a model until told to stop."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch import nn

from ..errors import MissingExtra
from .engine import Engine

if TYPE_CHECKING:
    from fastapi import FastAPI

_DRAIN = 30  # seconds that open requests have to end, once the server is told to stop


def app(engine: Engine, *, tokens: Mapping[str, str] | Sequence[str] | None = None, **limits: Any) -> FastAPI:
    """Return an ASGI application that serves `engine`: REST, KServe v2, WebSockets, metrics and a live page.

    Args:
        engine: What to serve; it is shut down, with all inputs committed, when the application ends.
        tokens: Bearer tokens, by name of the caller or alone. A session belongs to the caller that began it. None: no
            token is needed, and all callers are one.
        limits: `body` bytes of a request, `steps` of an input, `new_sessions` a second for each token, `window` of
            inputs under way on a WebSocket.
    """
    try:
        from .web import Limits, make_app
    except ModuleNotFoundError as error:
        raise MissingExtra(
            f"a server needs {error.name}, which is not installed: pip install 'hiddenstate[serve]'."
        ) from error
    return make_app(engine, tokens=tokens, limits=Limits(**{"window": max(1, engine.replay), **limits}))


def run(
    model: nn.Module,
    *,
    store: str = "sqlite:///sessions.db",
    host: str = "127.0.0.1",
    port: int = 8080,
    tokens: Mapping[str, str] | Sequence[str] | None = None,
    limits: Mapping[str, Any] | None = None,
    log_level: str = "info",
    **options: Any,
) -> None:
    """Serve `model` until the process is told to stop; then finish and commit what is under way.

    Args:
        model: Any model that `Engine` takes.
        store: `memory:`, `sqlite:///path` or `redis://host:port/number`.
        host: Where to listen; `0.0.0.0` for the whole network, and then with tokens.
        port: Where to listen.
        tokens: As in `app`.
        limits: As in `app`.
        log_level: Of uvicorn.
        options: Of `Engine`.
    """
    try:
        import uvicorn
    except ModuleNotFoundError as error:
        raise MissingExtra(
            f"a server needs {error.name}, which is not installed: pip install 'hiddenstate[serve]'."
        ) from error
    with Engine(model, store, **options) as engine:
        application = app(engine, tokens=tokens, **(limits or {}))
        most = application.state.gateway.limits.body
        uvicorn.run(
            application,
            host=host,
            port=port,
            log_level=log_level,
            ws_max_size=most,
            ws_max_queue=application.state.gateway.limits.window,
            ws_per_message_deflate=False,
            timeout_graceful_shutdown=_DRAIN,
        )
