"""Activation checkpointing, which runs a module once more in a backward pass: asked for, and foreseen."""

from __future__ import annotations

import os
import sys
from types import FrameType

import torch

CHECKPOINT = os.path.join("torch", "utils", "checkpoint.py")


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
