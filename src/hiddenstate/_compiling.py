"""Whether this code is being compiled or exported by torch, in this thread."""

from __future__ import annotations

import sys
from typing import Any

import torch


def compiling() -> bool:
    """Say whether this code is being compiled or exported just now; torch's own flag says so of all threads at once."""
    return torch.compiler.is_dynamo_compiling() or (torch.compiler.is_compiling() and _tracing_here())


def _tracing_here() -> bool:
    context: Any = getattr(sys.modules.get("torch._guards"), "TracingContext", None)
    return context is None or context.try_get() is not None
