"""The REST routes: sessions as resources."""

from __future__ import annotations

import dataclasses
import time
import uuid
from contextlib import nullcontext
from typing import Annotated, Any

from fastapi import APIRouter, HTTPException, Query, Request, Response
from pydantic import BaseModel, Field
from torch import Tensor

from ...errors import BadInput, SessionLost
from ...state import from_bytes
from ..wire import JSON, SAFETENSORS, check_file, from_json, named_tensors, pack, parse_json, to_json, unpack
from .callers import Caller
from .gateway import CurrentCaller, CurrentGateway, Gateway, numbers_in, off_loop

_LARGEST_SEQ = 2**62
_LONGEST_TIMEOUT = 3600.0  # seconds


class NewSession(BaseModel):
    """A session to begin, or to fork to."""

    id: str | None = Field(None, min_length=1, max_length=256, description="its name; made up where none is given")


class SessionFacts(BaseModel):
    """A session as it is after its last input."""

    id: str
    seq: int
    steps: int
    opened: float
    touched: float
    expires: float | None
    fingerprint: str
    hot: bool


class Outputs(BaseModel):
    """What the model gave for an input."""

    seq: int = Field(description="the number of the input")
    y: Any = Field(description="nested as the model nests it")


class SessionNames(BaseModel):
    """Names of sessions, in order."""

    sessions: list[str]


_TENSOR = {
    "content": {
        JSON: {
            "schema": {
                "type": "object",
                "required": ["x"],
                "properties": {
                    "x": {"description": "one step, or a list of steps, as nested lists of numbers", "type": "array"},
                    "seq": {"type": "integer", "minimum": 1},
                },
            }
        },
        SAFETENSORS: {"schema": {"type": "string", "format": "binary"}},
    },
    "required": True,
}
_BINARY = {SAFETENSORS: {"schema": {"type": "string", "format": "binary"}}}
_FILE = {"content": _BINARY, "required": True}
_ERRORS: dict[int | str, dict[str, Any]] = {
    400: {"description": "the request cannot mean what it says"},
    401: {"description": "no token, or one that is not known"},
    403: {"description": "the request comes from a page that may not talk to this server"},
    404: {"description": "there is no such session"},
    409: {"description": "the session is another model's, exists already, or the input does not follow the last one"},
    410: {"description": "the session has expired"},
    413: {"description": "too many bytes or steps"},
    422: {"description": "the model failed on this input; the session is as it was"},
    429: {"description": "too many new sessions, inputs or streams"},
    421: {"description": "the server does not answer to this name"},
    504: {"description": "the input's turn did not come in time, or its answer did not"},
    503: {"description": "the store is out of reach or full; try again"},
}

router = APIRouter(prefix="/v1/sessions", tags=["sessions"], responses=_ERRORS)


@router.post("", status_code=201)
async def open_session(gateway: CurrentGateway, caller: CurrentCaller, new: NewSession | None = None) -> SessionFacts:
    """Begin a session."""
    name = (new.id if new else None) or uuid.uuid4().hex
    key = gateway.key(caller, name)
    await gateway.begin(caller, key)
    return await _facts_of_begun(gateway, caller, key)


@router.put("/{session}", status_code=201)
async def open_named(
    gateway: CurrentGateway, caller: CurrentCaller, session: str, exist_ok: bool = False
) -> SessionFacts:
    """Begin a session of this name, or with `exist_ok` go on with the one that is there."""
    key = gateway.key(caller, session)
    await gateway.begin(caller, key, exist_ok=exist_ok)
    return await _facts_of_begun(gateway, caller, key)


@router.get("")
async def list_sessions(
    gateway: CurrentGateway,
    caller: CurrentCaller,
    prefix: str = "",
    after: str = "",
    limit: Annotated[int, Query(ge=1, le=10_000)] = 1000,
) -> SessionNames:
    """List the caller's sessions in order, from the first after `after` on."""
    own = f"{caller.name}:" if caller.name else ""
    found = await gateway.engine.asessions(own + prefix, after=own + after if after else "", limit=limit)
    return SessionNames(sessions=[gateway.name(caller, key) for key in found])


@router.get("/{session}")
async def get_session(gateway: CurrentGateway, caller: CurrentCaller, session: str) -> SessionFacts:
    """Tell how far a session has come."""
    return await _facts(gateway, caller, gateway.key(caller, session))


@router.delete("/{session}", status_code=204)
async def close_session(gateway: CurrentGateway, caller: CurrentCaller, session: str) -> None:
    """End a session."""
    await gateway.engine.aclose(gateway.key(caller, session))


@router.post("/{session}/steps", openapi_extra={"requestBody": _TENSOR}, response_model=Outputs)
async def push(
    gateway: CurrentGateway,
    caller: CurrentCaller,
    session: str,
    request: Request,
    *,
    seq: Annotated[int | None, Query(ge=1, lt=_LARGEST_SEQ)] = None,
    create: Annotated[bool, Query(alias="open")] = False,
    timeout: Annotated[float | None, Query(gt=0, le=_LONGEST_TIMEOUT)] = None,
) -> Response:
    """Apply one step or a piece, as JSON `{"x": …, "seq": …}` or as a safetensors file with one tensor `x`.

    The answer has the form of the request. With `open` a session that is not there is begun. With `timeout`, an input
    whose turn has not come within so many seconds is 504, and is not applied.
    """
    key = gateway.key(caller, session)
    binary = _media_type(request) == SAFETENSORS
    body = await gateway.body_of(request, json=not binary)
    if binary:
        x, number = unpack(body), seq
    else:
        x, number = await off_loop(len(body), _read_json, gateway, body, seq)
    gateway.check_steps(x)
    gateway.admit_inputs(caller)
    given = gateway.engine.submit(key, x, number)
    try:
        output = gateway.engine.output(await given.outcome(timeout))
    except SessionLost as error:
        if not create or error.reason != "unknown":
            raise
        await gateway.begin(caller, key, exist_ok=True)
        given = gateway.engine.submit(key, x, number)
        output = gateway.engine.output(await given.outcome(timeout))
    if binary:
        return Response(pack(named_tensors(output)), media_type=SAFETENSORS, headers={"x-seq": str(given.seq)})
    text = await off_loop(numbers_in(output), to_json, {"seq": given.seq, "y": output})
    return Response(text, media_type=JSON)


@router.post("/{session}/reset", status_code=204)
async def reset(gateway: CurrentGateway, caller: CurrentCaller, session: str) -> None:
    """Let a session start anew; the numbering of its inputs goes on."""
    await gateway.engine.areset(gateway.key(caller, session))


@router.post("/{session}/fork", status_code=201)
async def fork(
    gateway: CurrentGateway, caller: CurrentCaller, session: str, new: NewSession | None = None
) -> SessionFacts:
    """Begin another session in the state of this one."""
    key = gateway.key(caller, session)
    target = gateway.key(caller, (new.id if new else None) or uuid.uuid4().hex)
    with gateway.new_session(caller):
        await gateway.engine.afork(key, target)
    return await _facts(gateway, caller, target)


@router.get("/{session}/state", response_class=Response, responses={200: {"content": _BINARY}})
async def export(gateway: CurrentGateway, caller: CurrentCaller, session: str, request: Request) -> Response:
    """Return a session's state as a safetensors file, or as JSON where that is asked for."""
    data = await gateway.engine.aexport(gateway.key(caller, session))
    if JSON in request.headers.get("accept", ""):
        text = await off_loop(len(data), to_json, {"parts": dict(from_bytes(data).items())})
        return Response(text, media_type=JSON)
    return Response(data, media_type=SAFETENSORS)


@router.put("/{session}/state", openapi_extra={"requestBody": _FILE})
async def import_state(
    gateway: CurrentGateway, caller: CurrentCaller, session: str, request: Request, any_model: bool = False
) -> SessionFacts:
    """Put a session, begun if need be, where an exported one was."""
    key = gateway.key(caller, session)
    data = await gateway.body_of(request, json=False)
    check_file(data)
    known = await gateway.exists(key, damaged=True)
    with nullcontext() if known else gateway.new_session(caller):
        await gateway.engine.aimport_(key, data, any_model=any_model)
    return await _facts(gateway, caller, key)


async def _facts_of_begun(gateway: Gateway, caller: Caller, key: str) -> SessionFacts:
    """Tell about a session that was begun just now; also where somebody else has ended it since."""
    try:
        return await _facts(gateway, caller, key)
    except SessionLost:
        now, name = time.time(), gateway.name(caller, key)
        times: dict[str, Any] = {"opened": now, "touched": now, "expires": None}
        return SessionFacts(id=name, seq=0, steps=0, fingerprint=gateway.engine.fingerprint, hot=False, **times)


async def _facts(gateway: Gateway, caller: Caller, key: str) -> SessionFacts:
    facts = dataclasses.asdict(await gateway.engine.ainfo(key))
    return SessionFacts(**{**facts, "id": gateway.name(caller, key)})


def _media_type(request: Request) -> str:
    return request.headers.get("content-type", JSON).partition(";")[0].strip().lower()


def _read_json(gateway: Gateway, body: bytes, seq: int | None) -> tuple[Tensor, int | None]:
    content = parse_json(body)
    if not isinstance(content, dict) or "x" not in content:
        raise BadInput('the body is a JSON object with "x", one step or a list of steps, and perhaps "seq".')
    number = content.get("seq", seq)
    if number is not None and (type(number) is not int or not 1 <= number < _LARGEST_SEQ):
        raise BadInput(f"seq is {str(number)[:40]}, but inputs are numbered from 1 on.")
    if seq is not None and number != seq:
        raise HTTPException(400, f"the body says that seq is {number}, the address that it is {seq}.")
    return from_json(content["x"], gateway.engine.dtype, depth=len(gateway.engine.step_shape) + 1), number
