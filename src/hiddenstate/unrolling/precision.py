"""The precision of float32 products on a GPU: that of torch's matrix products, or that of cuDNN's layers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch

_as_cudnn: ContextVar[bool] = ContextVar("as_cudnn", default=False)


def is_exact() -> bool:
    """Say whether float32 factors are multiplied whole; else the matrix units round them to tf32."""
    if _as_cudnn.get():
        return not cudnn_rounds()
    return torch.get_float32_matmul_precision() == "highest"


def cudnn_rounds() -> bool:
    """Say whether cuDNN's recurrent layers may round float32 factors to tf32, as they do unless told otherwise."""
    backends: Any = torch.backends
    said = (backends.cudnn.rnn.fp32_precision, backends.cudnn.fp32_precision, backends.fp32_precision)
    return next((precision for precision in said if precision != "none"), "ieee") == "tf32"


@contextmanager
def as_cudnn() -> Iterator[None]:
    """Multiply in loops as cuDNN's own layers would."""
    token = _as_cudnn.set(True)
    try:
        yield
    finally:
        _as_cudnn.reset(token)
