"""Tensors on the wire: as JSON, as safetensors, as raw bytes."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor

from ..errors import BadInput
from ..state import tensors

SAFETENSORS = "application/octet-stream"
JSON = "application/json"


def named_tensors(output: Any, name: str = "y") -> dict[str, Tensor]:
    """Return the tensors of a nested output by name: `y`, or `y.0`, `y.logits` and so on.

    >>> sorted(named_tensors({"logits": torch.zeros(1), "states": (torch.zeros(2), None)}))
    ['y.logits', 'y.states.0']
    """
    return {".".join((name, *map(str, path))): tensor for path, tensor in tensors(output).items()}


def to_json(output: Any) -> Any:
    """Return an output as JSON values; a number that is not finite becomes None.

    >>> to_json((torch.tensor([1.0, float("-inf")]), None))
    [[1.0, None], None]
    """
    if isinstance(output, Tensor):
        values = output.detach().cpu()
        values = values.float() if values.dtype in (torch.bfloat16, torch.float16) else values
        return values.tolist() if bool(torch.isfinite(values).all()) else _finite(values.tolist())
    if isinstance(output, Mapping):
        return {str(key): to_json(inner) for key, inner in output.items()}
    if isinstance(output, tuple | list):
        return [to_json(inner) for inner in output]
    if hasattr(output, "__dataclass_fields__"):
        return {field: to_json(getattr(output, field)) for field in output.__dataclass_fields__}
    return None


def _finite(values: Any) -> Any:
    if isinstance(values, list):
        return [_finite(value) for value in values]
    return None if isinstance(values, float) and not math.isfinite(values) else values


def from_json(x: Any, dtype: torch.dtype) -> Tensor:
    """Return nested lists of numbers as a tensor of `dtype`."""
    if not _numbers(x):
        raise BadInput("x is not made of numbers: it is one step, or a list of steps, as nested lists of numbers.")
    try:
        tensor = torch.tensor(x)
        if tensor.is_floating_point() and not dtype.is_floating_point:
            raise BadInput(f"x has fractions, but this model takes {dtype}.")
        return tensor.to(dtype)
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise BadInput(f"x cannot be made a tensor: {error}") from None


def _numbers(x: Any) -> bool:
    if isinstance(x, list):
        return all(map(_numbers, x))
    return isinstance(x, int | float) and not isinstance(x, bool)


def pack(content: Mapping[str, Tensor]) -> bytes:
    """Return a safetensors file."""
    return safetensors.torch.save({name: tensor.detach().cpu().contiguous() for name, tensor in content.items()})


def unpack(data: bytes, name: str = "x") -> Tensor:
    """Return the one tensor in a safetensors file, which must have this name."""
    try:
        content = safetensors.torch.load(data)
    except (SafetensorError, LookupError, RuntimeError, TypeError, ValueError, AssertionError) as error:
        raise BadInput(f"the body is no safetensors file: {error}") from None
    if set(content) != {name}:
        raise BadInput(
            f"the file holds {', '.join(sorted(content)) or 'nothing'}, but one tensor named {name!r} is needed."
        )
    return content[name]


def to_raw(tensor: Tensor) -> bytes:
    """Return the raw bytes of a tensor, little-endian, in row-major order."""
    plain = tensor.detach().cpu().contiguous()
    return plain.reshape(-1).view(torch.uint8).numpy().tobytes() if plain.numel() else b""


def parse_json(data: bytes | str) -> Any:
    """Return the value of a JSON text, or raise `BadInput`."""
    try:
        return json.loads(data)
    except (ValueError, RecursionError) as error:
        raise BadInput(f"this is no JSON: {error}") from None
