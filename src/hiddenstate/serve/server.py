"""An engine as a web server: `app` returns the ASGI application, `run` serves a model until told to stop."""

from __future__ import annotations

import errno
import ipaddress
import os
import socket
import ssl
import threading
from collections.abc import Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import nn

from ..errors import BadInput, MissingExtra
from .engine import Engine

if TYPE_CHECKING:
    import uvicorn
    from fastapi import FastAPI

    from .web import Given, Tokens

_BACKLOG = 2048  # connections that wait to be taken
_NOT_HERE = (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT)  # an address of a kind that this machine does not have
_CLOSING = 2  # seconds that the engine and the store have to end, of those of `drain`


@dataclass(frozen=True, slots=True)
class Tls:
    """Where the certificate of a server is, and whose clients' certificates it wants to see."""

    certificate: str
    key: str | None = None  # None: in the same file
    password: str | None = None  # of the key
    client_ca: str | None = None  # clients need a certificate by one of these

    def options(self) -> dict[str, Any]:
        """Return these as uvicorn takes them, or raise where they cannot be used."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        try:
            context.load_cert_chain(self.certificate, self.key, self.password or "")
            if self.client_ca is not None:
                context.load_verify_locations(self.client_ca)
        except (OSError, ssl.SSLError) as error:
            raise BadInput(f"the certificate {self.certificate} cannot be used: {error}.") from error
        found: dict[str, Any] = {
            "ssl_certfile": self.certificate,
            "ssl_keyfile": self.key,
            "ssl_keyfile_password": self.password,
        }
        if self.client_ca is not None:
            found |= {"ssl_ca_certs": self.client_ca, "ssl_cert_reqs": ssl.CERT_REQUIRED}
        return found


def app(
    engine: Engine,
    *,
    tokens: Given | Tokens = None,
    hosts: Collection[str] | None = None,
    origins: Collection[str] = (),
    **limits: Any,
) -> FastAPI:
    """Return an ASGI application that serves `engine`: REST, KServe v2, WebSockets, metrics and a live page.

    Args:
        engine: What to serve; it is shut down, with all inputs committed, when the application ends.
        tokens: Bearer tokens, by name of the caller (several for one, if need be) or alone. A session belongs to the
            caller that began it. None: those in the variable HIDDENSTATE_TOKENS; where there are none, no token is
            needed, and all callers are one.
        hosts: The names that the server answers to, beside localhost and addresses in numbers; `["*"]` for any. None:
            any where tokens are needed, else these alone.
        origins: Web pages of others that may talk to it, as `https://example.org`.
        limits: `body` and `json` bytes of a request, `steps` of an input, `new_sessions` and `inputs` a second and
            `streams` at once for each caller, `window` of inputs under way on a WebSocket.
    """
    try:
        from .web import Limits, make_app
    except ModuleNotFoundError as error:
        raise _missing(error) from error
    most = Limits(**{"window": max(1, engine.replay), **limits})
    return make_app(engine, tokens=tokens, limits=most, hosts=hosts, origins=origins)


def run(
    model: nn.Module,
    *,
    store: str = "sqlite:///sessions.db",
    host: str = "127.0.0.1",
    port: int = 8080,
    tokens: Given | Tokens = None,
    token_file: str | None = None,
    insecure: bool = False,
    tls: Tls | None = None,
    metrics_port: int | None = None,
    hosts: Collection[str] | None = None,
    origins: Collection[str] = (),
    limits: Mapping[str, Any] | None = None,
    drain: float = 8.0,
    log_level: str = "info",
    log_format: str = "text",
    access_log: bool = False,
    check: bool = False,
    **options: Any,
) -> None:
    """Serve `model` until the process is told to stop; then finish and commit what is under way.

    Args:
        model: Any model that `Engine` takes.
        store: `memory:`, `sqlite:///path` or `redis://host:port/number`.
        host: Where to listen; `0.0.0.0` for the whole network, and then with tokens.
        port: Where to listen.
        tokens: As in `app`.
        token_file: A file with a line `name: token` for each token, read again when it changes.
        insecure: Whether to listen beyond this machine although no token is needed.
        tls: The server's certificate; None: plain HTTP.
        metrics_port: A second port, on this machine alone, on which /metrics and /v1/stats need no token.
        hosts: As in `app`.
        origins: As in `app`.
        limits: As in `app`.
        drain: Seconds that open requests have to end, once the server is told to stop.
        log_level: `debug`, `info`, `warning`, `error` or `critical`.
        log_format: `text`, or `json` for one object a line.
        access_log: Whether to log every request.
        check: Whether to look at all of this, the model and the store included, and not to serve.
        options: Of `Engine`.
    """
    try:
        import uvicorn

        from .web import metrics_app, open_tokens
    except ModuleNotFoundError as error:
        raise _missing(error) from error
    from .logs import log_config

    callers = open_tokens(tokens, file=token_file)
    _check_host(host, needs_token=callers.needed, insecure=insecure)
    secured = tls.options() if tls is not None else {}
    logging: dict[str, Any] = {
        "log_config": log_config(log_level, log_format, access=access_log),
        "log_level": log_level,
        "access_log": access_log,
    }
    with ExitStack() as stack:
        sockets = _bound(host, port, stack)
        beside = [] if metrics_port is None else _bound("127.0.0.1", metrics_port, stack)
        if metrics_port and metrics_port == port:
            raise BadInput(f"the port for metrics is {port}, which is that of the server itself: choose another one.")
        stack.enter_context(_without_traces(store, check=check))
        engine = stack.enter_context(Engine(model, store, **options))
        application = app(engine, tokens=callers, hosts=hosts, origins=origins, **(limits or {}))
        gateway = application.state.gateway
        if check:
            engine.check()
            return
        config = uvicorn.Config(
            application,
            host=host,
            port=port,
            ws_max_size=gateway.limits.body,
            ws_max_queue=gateway.limits.window,
            ws_per_message_deflate=False,
            timeout_graceful_shutdown=max(1, round(drain - _CLOSING)),
            **logging,
            **secured,
        )
        if metrics_port is not None:
            second = uvicorn.Config(metrics_app(gateway), host="127.0.0.1", port=metrics_port, **logging)
            _listen(beside)
            stack.enter_context(_beside(uvicorn.Server(second), beside))
        _listen(sockets)
        _draining_server(config, gateway.drain).run(sockets=sockets)


def _draining_server(config: uvicorn.Config, drain: Any) -> uvicorn.Server:
    import uvicorn

    class DrainingServer(uvicorn.Server):
        """A server that says that it ends before it waits for the requests under way."""

        async def shutdown(self, *args: Any, **kwargs: Any) -> None:
            drain()
            await super().shutdown(*args, **kwargs)

    return DrainingServer(config)


def _bound(host: str, port: int, stack: ExitStack) -> list[socket.socket]:
    """Return a socket for each address that a host has, bound to the port; they are closed with the stack."""
    if not 0 <= port < 2**16:
        raise BadInput(f"the port is {port}, but a number from 0 to 65535 is needed.")
    try:
        found = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError) as error:
        raise BadInput(f"the server cannot listen on {host!r}, which leads to no address: {error}.") from error
    made: list[socket.socket] = []
    for family, kind, protocol, _, address in dict.fromkeys(found):
        free = made[0].getsockname()[1] if made and not port else port
        try:
            here = stack.enter_context(socket.socket(family, kind, protocol))
            if os.name == "posix":
                here.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                here.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)  # the others have sockets of their own
            here.bind((address[0], free, *address[2:]))
            made.append(here)
        except OSError as error:
            if error.errno in _NOT_HERE and (made or address is not found[-1][4]):
                continue  # as where there is no IPv6
            raise _cannot_listen(str(address[0]), port, error) from error
    return made


def _listen(sockets: list[socket.socket]) -> None:
    """Begin to take connections; not before all else is well, lest callers wait for a server that does not start."""
    for here in sockets:
        try:
            here.listen(_BACKLOG)
        except OSError as error:  # somebody else was quicker
            host, port = here.getsockname()[:2]
            raise _cannot_listen(host, port, error) from error


def _cannot_listen(host: str, port: int, error: OSError) -> BadInput:
    return BadInput(
        f"the server cannot listen on {host} port {port}: {os.strerror(error.errno or 0)}. Stop what listens there, or "
        f"choose another one: --port, --metrics-port, --host."
    )


@contextmanager
def _beside(server: uvicorn.Server, sockets: list[socket.socket]) -> Iterator[None]:
    """Run a second server in a thread of its own."""
    thread = threading.Thread(target=server.run, args=(sockets,), name="hiddenstate-metrics", daemon=True)
    thread.start()
    try:
        yield
    finally:
        server.should_exit = True
        thread.join(_CLOSING)


@contextmanager
def _without_traces(store: str, *, check: bool) -> Iterator[None]:
    """Remove the file of a store that was made only to see whether it can be."""
    path = str(store).removeprefix("sqlite:///")
    made = check and str(store).startswith("sqlite:///") and not os.path.exists(path)
    try:
        yield
    finally:
        for end in ("", "-wal", "-shm") if made else ():
            if os.path.exists(path + end):
                os.remove(path + end)


def _check_host(host: str, *, needs_token: bool, insecure: bool) -> None:
    try:
        local = host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        local = False
    if not local and not needs_token and not insecure:
        raise BadInput(
            f"the server would listen on {host or 'all addresses'!r}, where others can reach it, and needs no token: "
            f"anybody could read and change all sessions. Give callers tokens (a file of lines 'name: token', or the "
            f"variable HIDDENSTATE_TOKENS), listen on 127.0.0.1, or say that it is meant: --insecure."
        )


def _missing(error: ModuleNotFoundError) -> MissingExtra:
    return MissingExtra(f"a server needs {error.name}, which is not installed: pip install 'hiddenstate[serve]'.")
