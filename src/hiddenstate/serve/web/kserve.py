"""The infer route of the KServe v2 protocol, with sequences, so that existing clients work."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import torch
from fastapi import APIRouter, HTTPException, Request, Response
from torch import Tensor

from ...errors import BadInput, SessionLost
from ..wire import JSON, from_json, named_tensors, parse_json, to_json, to_raw
from .callers import Caller
from .gateway import CurrentCaller, CurrentGateway, Gateway, numbers_in, off_loop

router = APIRouter(prefix="/v2", tags=["KServe v2"])

_DTYPES = {
    "BOOL": torch.bool,
    "UINT8": torch.uint8,
    "INT8": torch.int8,
    "INT16": torch.int16,
    "INT32": torch.int32,
    "INT64": torch.int64,
    "FP16": torch.float16,
    "FP32": torch.float32,
    "FP64": torch.float64,
    "BF16": torch.bfloat16,
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
_VERSION = "1"
_LENGTH = "inference-header-content-length"


@router.get("")
async def server() -> dict[str, Any]:
    """Describe the server."""
    return {"name": "hiddenstate", "version": "1", "extensions": ["sequence", "binary_tensor_data"]}


@router.get("/health/live")
async def live() -> dict[str, bool]:
    """Say that the process is there."""
    return {"live": True}


@router.get("/health/ready")
async def ready(gateway: CurrentGateway) -> dict[str, bool]:
    """Say whether inputs are taken."""
    await gateway.ready()
    return {"ready": True}


@router.get("/models/{model}")
@router.get("/models/{model}/versions/{version}")
async def describe(gateway: CurrentGateway, model: str, version: str = _VERSION) -> dict[str, Any]:
    """Describe the model; whatever it is called, it is the one that is served."""
    _check_version(version)
    shape = [1, -1, *gateway.engine.step_shape]
    inputs = [{"name": "x", "datatype": _NAMES[gateway.engine.dtype], "shape": shape}]
    outputs = [
        {"name": out["name"], "datatype": _NAMES[getattr(torch, out["dtype"])], "shape": [1, *out["shape"]]}
        for out in gateway.engine.outputs
    ]
    return {"name": model, "versions": [_VERSION], "platform": "pytorch", "inputs": inputs, "outputs": outputs}


@router.get("/models/{model}/ready")
@router.get("/models/{model}/versions/{version}/ready")
async def model_ready(gateway: CurrentGateway, model: str, version: str = _VERSION) -> dict[str, Any]:
    """Say whether inputs are taken."""
    _check_version(version)
    return {"name": model, **await ready(gateway)}


_BODY: dict[str, Any] = {"requestBody": {"content": {"application/json": {}}}}


@router.post("/models/{model}/infer", openapi_extra=_BODY)
@router.post("/models/{model}/versions/{version}/infer", openapi_extra=_BODY)
async def infer(
    gateway: CurrentGateway, caller: CurrentCaller, model: str, request: Request, version: str = _VERSION
) -> Response:
    """Apply an input to the sequence that the parameters name.

    `sequence_start` begins it, in place of an older one of that name; `sequence_end` ends it after this input.
    """
    _check_version(version)
    content, blob = await _read(gateway, request)
    asked = _object(content.get("parameters", {}), "parameters")
    session = asked.get("sequence_id")
    if type(session) not in (int, str) or session in (0, ""):
        raise BadInput("parameters.sequence_id is needed: a number other than 0, or a string.")
    key = gateway.key(caller, str(session))
    x, batched = _input(gateway, content, blob)
    gateway.check_steps(x)
    gateway.admit_inputs(caller)
    if asked.get("sequence_start") is True:
        await _begin(gateway, caller, key)
    push = gateway.engine.submit(key, x, _seq(asked))
    output = gateway.engine.output(await push.outcome())
    if asked.get("sequence_end") is True:
        await gateway.engine.aclose(key)
    tensors = {name: tensor.unsqueeze(0) if batched else tensor for name, tensor in named_tensors(output).items()}
    facts = {"model_name": model, "model_version": _VERSION, "parameters": {"sequence_id": session, "seq": push.seq}}
    if isinstance(content.get("id"), str):
        facts["id"] = content["id"]
    return await off_loop(numbers_in(output), _answer, facts, tensors, _wants_binary(content))


def _check_version(version: str) -> None:
    if version != _VERSION:
        raise HTTPException(404, f"there is no version {version[:40]!r} of the model, only {_VERSION!r}.")


async def _begin(gateway: Gateway, caller: Caller, key: str) -> None:
    with gateway.new_session(caller):
        with suppress(SessionLost):
            await gateway.engine.aclose(key)
        await gateway.engine.aopen(key)


def _seq(asked: dict[str, Any]) -> int | None:
    seq = asked.get("seq")
    if seq is not None and (type(seq) is not int or not 1 <= seq < 2**62):
        raise BadInput("parameters.seq is a whole number from 1 on.")
    return seq


async def _read(gateway: Gateway, request: Request) -> tuple[dict[str, Any], bytes]:
    """Read a body, and split it into its JSON and the binary data behind it."""
    length = request.headers.get(_LENGTH)
    body = await gateway.body_of(request, json=length is None)
    end = len(body)
    if length is not None:
        if not (length.isascii() and length.isdecimal()) or len(length) > 20 or int(length) > len(body):
            raise BadInput(f"the header {_LENGTH} says {length[:20]}, but the body has {len(body)} bytes.")
        end = int(length)
        gateway.check_json(end)
    return _object(await off_loop(end, parse_json, body[:end]), "the body"), body[end:]


def _object(value: Any, name: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise BadInput(f"{name} is a JSON object.")
    return value


def _input(gateway: Gateway, content: dict[str, Any], blob: bytes) -> tuple[Tensor, bool]:
    inputs = content.get("inputs")
    if not isinstance(inputs, list) or len(inputs) != 1 or not isinstance(inputs[0], dict):
        raise BadInput("inputs is a list of one tensor.")
    given = inputs[0]
    dtype = _DTYPES.get(given.get("datatype", "")) if isinstance(given.get("datatype"), str) else None
    shape = given.get("shape")
    if dtype is None or not isinstance(shape, list) or not all(type(n) is int and 0 <= n < 2**31 for n in shape):
        raise BadInput(f"an input has a shape, a list of numbers, and a datatype, one of {', '.join(_DTYPES)}.")
    size = _object(given.get("parameters", {}), "the parameters of an input").get("binary_data_size")
    x = _from_blob(blob, size, dtype) if size is not None else _from_data(given.get("data"), dtype)
    if x.numel() != math.prod(shape):
        raise BadInput(f"an input of shape {shape} has {math.prod(shape)} numbers, but {x.numel()} were given.")
    x = x.reshape(shape)
    batched = x.dim() == len(gateway.engine.step_shape) + 2
    if batched and x.shape[0] != 1:
        raise BadInput(f"the input has {x.shape[0]} rows, but a sequence is one row: send one request for each.")
    return (x[0] if batched else x), batched


def _from_blob(blob: bytes, size: Any, dtype: torch.dtype) -> Tensor:
    if type(size) is not int or size != len(blob) or size % dtype.itemsize:
        raise BadInput(f"binary_data_size is {str(size)[:20]}, but {len(blob)} bytes follow the JSON.")
    return torch.frombuffer(bytearray(blob), dtype=dtype) if blob else torch.empty(0, dtype=dtype)


def _from_data(data: Any, dtype: torch.dtype) -> Tensor:
    if not isinstance(data, list):
        raise BadInput("an input has data, a list of numbers, or binary_data_size among its parameters.")
    return from_json(data, dtype).reshape(-1)


def _wants_binary(content: dict[str, Any]) -> bool:
    asked: Sequence[Any] = content["outputs"] if isinstance(content.get("outputs"), list) else []
    wants = [output.get("parameters") for output in asked if isinstance(output, dict)]
    parameters = content.get("parameters")
    return any(isinstance(want, dict) and want.get("binary_data") is True for want in wants) or (
        isinstance(parameters, dict) and parameters.get("binary_data_output") is True
    )


def _answer(facts: dict[str, Any], tensors: dict[str, Tensor], binary: bool) -> Response:
    outputs: list[dict[str, Any]] = []
    blobs = []
    for name, tensor in tensors.items():
        output: dict[str, Any] = {"name": name, "datatype": _NAMES[tensor.dtype], "shape": list(tensor.shape)}
        if binary:
            blobs.append(to_raw(tensor))
            output["parameters"] = {"binary_data_size": len(blobs[-1])}
        else:
            output["data"] = tensor.reshape(-1)
        outputs.append(output)
    content = {**facts, "outputs": outputs}
    text = to_json(content)
    if not binary:
        return Response(text, media_type=JSON)
    headers = {"Inference-Header-Content-Length": str(len(text))}
    return Response(text + b"".join(blobs), media_type="application/octet-stream", headers=headers)
