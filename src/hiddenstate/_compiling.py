"""Whether this code is being compiled or exported by torch, in this thread, or is run again by checkpointing."""

from __future__ import annotations

import os
import sys
from types import FrameType
from typing import Any

import torch

CHECKPOINT = os.path.join("torch", "utils", "checkpoint.py")


def compiling() -> bool:
    """Say whether this code is being compiled or exported just now; torch's own flag says so of all threads at once."""
    return torch.compiler.is_dynamo_compiling() or (torch.compiler.is_compiling() and _tracing_here())


def recomputing() -> bool:
    """Say whether a backward pass is running: then a layer is called by activation checkpointing, once more."""
    return bool(torch._C._current_graph_task_id() != -1)


def under_checkpointing() -> bool:
    """Say whether what runs now runs for activation checkpointing, which will run it once more."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_filename.endswith(CHECKPOINT):
            return True
        frame = frame.f_back
    return False


def may_be_recomputed(*, grad_before: bool) -> bool:
    """Say whether a call may be run again in a backward pass; `grad_before`: the model was called with gradients on."""
    if torch.is_grad_enabled():  # one form of checkpointing steps in where tensors are saved for backward
        return torch._C._autograd._top_saved_tensors_default_hooks(True) is not None
    return grad_before and under_checkpointing()  # the other one runs the model without gradients first


def _tracing_here() -> bool:
    context: Any = getattr(sys.modules.get("torch._guards"), "TracingContext", None)
    return context is None or context.try_get() is not None
