"""The command `serve`: a model behind a server, with every limit as an option."""

from __future__ import annotations

import os
from functools import partial
from typing import Annotated, Any

import typer

from ..errors import BadInput
from .loaders import load_inputs, load_model, load_object

_KEY_PASSWORD = "HIDDENSTATE_TLS_PASSWORD"

_safety = partial(typer.Option, rich_help_panel="Who may call")
_limit = partial(typer.Option, rich_help_panel="Limits")
_log = partial(typer.Option, rich_help_panel="Logs and numbers")

Model = Annotated[
    str, typer.Argument(help="package.module:factory or file.py:factory; a model, or a function of none.")
]
Weights = Annotated[
    str | None, typer.Option("--weights", help="A checkpoint: .safetensors, or of a .pt file its tensors alone.")
]
Inputs = Annotated[
    list[str] | None, typer.Option("--input", "-i", help="An example of the input, where none can be made up.")
]
Store = Annotated[
    str,
    typer.Option(
        help="memory:, sqlite:///path, redis://host:port/number, redis+sentinel://hosts/service, redis+cluster://hosts."
    ),
]
Host = Annotated[str, typer.Option(help="0.0.0.0 for the whole network, and then with tokens.")]
Port = Annotated[int, typer.Option(min=0, max=65535)]
Version = Annotated[int | None, typer.Option(help="Of the model: a number that rises from one to the next.")]
Migrate = Annotated[
    str | None, typer.Option(help="package.module:function, from an older version's State to this one's; or drain.")
]
Check = Annotated[bool, typer.Option("--check", help="Look at all of this, and do not serve.")]

TokenFile = Annotated[str | None, _safety(help="A file of lines 'name: token'; else the variable HIDDENSTATE_TOKENS.")]
Token = Annotated[
    list[str] | None, _safety(help="A token, for trying things out: others see it in the list of processes.")
]
Insecure = Annotated[bool, _safety("--insecure", help="Listen beyond this machine without tokens.")]
AllowHost = Annotated[list[str] | None, _safety(help="A name that the server answers to; * for any.")]
AllowOrigin = Annotated[list[str] | None, _safety(help="A web page that may talk to it, as https://example.org.")]
TlsCert = Annotated[str | None, _safety(help="The server's certificate.")]
TlsKey = Annotated[str | None, _safety(help=f"Its key, where that is another file; its password: {_KEY_PASSWORD}.")]
TlsClientCa = Annotated[str | None, _safety(help="Whose certificates clients need.")]

MaxBatch = Annotated[int, _limit(min=1, help="Sessions in one call of the model.")]
MaxSessions = Annotated[int, _limit(min=1, help="Sessions kept hot; more go to the store.")]
MaxStored = Annotated[int, _limit(min=1, help="Sessions in the store.")]
MaxPending = Annotated[int, _limit(min=1, help="Operations that wait.")]
MaxWait = Annotated[float, _limit(min=0, help="Milliseconds that an input waits for others to join it.")]
Ttl = Annotated[float | None, _limit(help="Seconds after which an unused session expires.")]
Replay = Annotated[int, _limit(min=0, help="Answers kept of each session.")]
MaxBody = Annotated[int, _limit(min=1, help="Bytes of a request or frame.")]
MaxJson = Annotated[int, _limit(min=1, help="Of these, as JSON.")]
MaxSteps = Annotated[int, _limit(min=1, help="Steps of an input.")]
NewSessions = Annotated[float, _limit(help="New sessions a second, for each caller.")]
MaxInputs = Annotated[float | None, _limit(help="Inputs a second, for each caller; any number without it.")]
MaxStreams = Annotated[int, _limit(min=1, help="WebSockets at once, for each caller.")]
Window = Annotated[int | None, _limit(min=1, help="Inputs under way on a WebSocket; as many as --replay without it.")]
Drain = Annotated[float, _limit(min=3, help="Seconds to end in, once told to stop.")]

MetricsPort = Annotated[int | None, _log(help="A second port, local, with /metrics and /v1/stats without a token.")]
LogLevel = Annotated[str, _log(help="debug, info, warning, error or critical.")]
LogFormat = Annotated[str, _log(help="text, or json: one object a line.")]
AccessLog = Annotated[bool, _log("--access-log", help="Log every request.")]


def serve(
    model: Model,
    *,
    store: Store = "sqlite:///sessions.db",
    host: Host = "127.0.0.1",
    port: Port = 8080,
    weights: Weights = None,
    inputs: Inputs = None,
    model_version: Version = None,
    migrate: Migrate = None,
    check: Check = False,
    tokens: TokenFile = None,
    token: Token = None,
    insecure: Insecure = False,
    allow_host: AllowHost = None,
    allow_origin: AllowOrigin = None,
    tls_cert: TlsCert = None,
    tls_key: TlsKey = None,
    tls_client_ca: TlsClientCa = None,
    max_batch: MaxBatch = 256,
    max_sessions: MaxSessions = 4096,
    max_stored: MaxStored = 1_000_000,
    max_pending: MaxPending = 100_000,
    max_wait_ms: MaxWait = 2.0,
    ttl: Ttl = None,
    replay: Replay = 8,
    max_body: MaxBody = 16 * 2**20,
    max_json: MaxJson = 2**20,
    max_steps: MaxSteps = 4096,
    new_sessions: NewSessions = 100.0,
    max_inputs: MaxInputs = None,
    max_streams: MaxStreams = 1024,
    window: Window = None,
    drain: Drain = 8.0,
    metrics_port: MetricsPort = None,
    log_level: LogLevel = "info",
    log_format: LogFormat = "text",
    access_log: AccessLog = False,
) -> None:
    """Serve a model: one state for each caller, batched and durable, over REST, KServe v2 and WebSockets."""
    from ..serve import Tls, run

    if tls_cert is None and (tls_key or tls_client_ca):
        raise BadInput("--tls-key and --tls-client-ca need --tls-cert, the server's own certificate.")
    tls = None if tls_cert is None else Tls(tls_cert, tls_key, os.environ.get(_KEY_PASSWORD), tls_client_ca)
    made, found = load_model(model, weights)
    given = load_inputs(inputs, made) if inputs else found
    limits: dict[str, Any] = {"body": max_body, "json": max_json, "steps": max_steps, "new_sessions": new_sessions}
    limits |= {"streams": max_streams, "inputs": max_inputs, "window": window}
    options: dict[str, Any] = {"max_batch": max_batch, "max_sessions": max_sessions, "max_stored": max_stored}
    options |= {"max_pending": max_pending, "max_wait_ms": max_wait_ms, "ttl": ttl, "replay": replay}
    options |= {"migrate": migrate if migrate in (None, "drain") else load_object(migrate, "a migration")}
    options |= _given(tokens=token, hosts=allow_host, origins=allow_origin, example=given[0] if given else None)
    options |= {"store": store, "host": host, "port": port, "check": check, "drain": drain, "version": model_version}
    options |= {"token_file": tokens, "insecure": insecure, "tls": tls, "limits": _given(**limits)}
    options |= {"metrics_port": metrics_port, "log_level": log_level, "log_format": log_format}
    run(made, access_log=access_log, **options)
    if check:
        typer.echo(f"all is well: {model} can be served on {host}:{port} with {store.rpartition('@')[2]}")


def _given(**options: Any) -> dict[str, Any]:
    """Return the options without those that are None or empty."""
    return {name: value for name, value in options.items() if value is not None and value != []}
