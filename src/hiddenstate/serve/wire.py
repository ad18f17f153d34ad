"""Tensors on the wire: as JSON, as safetensors, as raw bytes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

import numpy as np
import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor

from ..errors import BadInput
from ..state import tensors

SAFETENSORS = "application/octet-stream"
JSON = "application/json"

_AT_ONCE = 2**16  # numbers that are written as text in one go
_DEPTH = 8  # of lists within each other
_HEADER = 2**20  # bytes in front of the tensors of a file


def named_tensors(output: Any, name: str = "y") -> dict[str, Tensor]:
    """Return the tensors of a nested output by name: `y`, or `y.0`, `y.logits` and so on.

    >>> sorted(named_tensors({"logits": torch.zeros(1), "states": (torch.zeros(2), None)}))
    ['y.logits', 'y.states.0']
    """
    return {".".join((name, *map(str, path))): tensor for path, tensor in tensors(output).items()}


def to_json(value: Any) -> bytes:
    """Return a value as JSON text, with the tensors within it as nested lists; a number that is not finite is null.

    >>> to_json({"y": (torch.tensor([1.0, float("-inf")]), None), "seq": 3})
    b'{"y":[[1.0,null],null],"seq":3}'
    """
    return b"".join(_json_pieces(value))


def _json_pieces(value: Any) -> Iterator[bytes]:
    import orjson

    if hasattr(value, "__dataclass_fields__"):
        value = {field: getattr(value, field) for field in value.__dataclass_fields__}
    if isinstance(value, Tensor):
        yield from _json_array(_as_array(value))
    elif isinstance(value, Mapping):
        between = b"{"
        for key, inner in value.items():
            yield between + orjson.dumps(str(key)) + b":"
            yield from _json_pieces(inner)
            between = b","
        yield b"}" if value else b"{}"
    elif isinstance(value, tuple | list):
        between = b"["
        for inner in value:
            yield between
            yield from _json_pieces(inner)
            between = b","
        yield b"]" if value else b"[]"
    else:
        yield orjson.dumps(value) if isinstance(value, str | int | float | None) else b"null"


def _json_array(array: Any) -> Iterator[bytes]:
    """Yield the text of an array piece by piece: whoever waits for the interpreter's lock gets it in between."""
    import orjson

    if not array.ndim:
        yield orjson.dumps(array.item())
        return
    rows = max(1, _AT_ONCE * len(array) // array.size) if array.size else len(array)
    between = b"["
    for begin in range(0, len(array), rows):
        some = array[begin : begin + rows]
        yield between
        if rows == 1 and some.size > _AT_ONCE and array.ndim > 1:
            yield from _json_array(some[0])
        else:
            yield orjson.dumps(some, option=orjson.OPT_SERIALIZE_NUMPY)[1:-1]
        between = b","
    yield b"]" if len(array) else b"[]"


def _as_array(tensor: Tensor) -> Any:
    plain = tensor.detach().cpu().resolve_conj().resolve_neg()
    if plain.is_complex():
        plain = torch.view_as_real(plain)
    return (plain.float() if plain.dtype in (torch.bfloat16, torch.float16) else plain).contiguous().numpy()


def from_json(x: Any, dtype: torch.dtype, *, depth: int = _DEPTH) -> Tensor:
    """Return nested lists of numbers, at most `depth` within each other, as a tensor of `dtype`."""
    level, shape = [x], list[int]()
    while (kinds := set(map(type, level))) == {list}:
        lengths = set(map(len, level))
        if len(shape) > depth or len(lengths) != 1:
            what = f"more than {depth} lists within each other" if len(lengths) == 1 else "rows of different lengths"
            raise BadInput(f"x cannot be made a tensor: it has {what}.")
        shape += lengths
        level = list(chain.from_iterable(level))
    if not kinds <= {int, float}:
        raise BadInput("x is not made of numbers: it is one step, or a list of steps, as nested lists of numbers.")
    if float in kinds and not dtype.is_floating_point and not dtype.is_complex:
        raise BadInput(f"x has fractions, but this model takes {dtype}.")
    try:
        numbers = torch.from_numpy(
            np.array(level, np.float64 if float in kinds or dtype.is_floating_point else np.int64)
        )
        found = numbers.to(dtype)
        # JSON has no infinity: one that comes of a cast, or another whole number, is not what was sent.
        lost = ~found.isfinite() if dtype.is_floating_point or dtype.is_complex else found.to(torch.int64) != numbers
        if bool(lost.any()):
            raise BadInput(f"x has {numbers[lost][0].item():g}, which this model's {dtype} cannot hold.")
        return found.reshape(shape)
    except (ValueError, RuntimeError, OverflowError) as error:
        raise BadInput(f"x cannot be made a tensor: {error}") from None


def is_single_step(shape: Sequence[int], step_shape: Sequence[int]) -> bool:
    """Return whether an input of this shape is one step without a time axis, rather than a piece; raise if neither."""
    shape, step_shape = tuple(shape), tuple(step_shape)
    if shape != step_shape and (len(shape) != len(step_shape) + 1 or shape[1:] != step_shape or not shape[0]):
        raise BadInput(
            f"x has shape {shape}, but one step of this model has {step_shape}, and a piece has steps in front of "
            f"that, one or more. A session is one row: there is no batch axis."
        )
    return shape == step_shape


def as_dtype(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return an input in the dtype that a model takes, or raise where that would lose what is in it."""
    if x.dtype == dtype:
        return x.detach()
    if x.is_complex() or (x.is_floating_point() and not dtype.is_floating_point):
        raise BadInput(f"x is {x.dtype}, but this model takes {dtype}, and a cast would lose what is in it.")
    return x.detach().to(dtype)


def pack(content: Mapping[str, Tensor]) -> bytes:
    """Return a safetensors file."""
    return safetensors.torch.save({name: tensor.detach().cpu().contiguous() for name, tensor in content.items()})


def unpack(data: bytes, name: str = "x") -> Tensor:
    """Return the one tensor in a safetensors file, which must have this name."""
    check_file(data)
    try:
        content = safetensors.torch.load(data)
    except (SafetensorError, LookupError, RuntimeError, TypeError, ValueError, AssertionError) as error:
        raise BadInput(f"the body is no safetensors file: {error}") from None
    if set(content) != {name}:
        raise BadInput(
            f"the file holds {', '.join(sorted(content)) or 'nothing'}, but one tensor named {name!r} is needed."
        )
    return content[name]


def check_file(data: bytes) -> None:
    """Refuse a safetensors file whose header is so long that reading it would hold others up."""
    if (length := int.from_bytes(data[:8], "little")) > _HEADER:
        raise BadInput(f"the body is no safetensors file: its header would have {length} bytes.")


def to_raw(tensor: Tensor) -> bytes:
    """Return the raw bytes of a tensor, little-endian, in row-major order."""
    plain = tensor.detach().cpu().contiguous()
    return plain.reshape(-1).view(torch.uint8).numpy().tobytes() if plain.numel() else b""


def parse_json(data: bytes | str) -> Any:
    """Return the value of a JSON text, or raise `BadInput`."""
    import orjson

    try:
        return orjson.loads(data)
    except ValueError as error:
        raise BadInput(f"this is no JSON: {error}") from None
