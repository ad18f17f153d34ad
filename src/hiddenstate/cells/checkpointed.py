"""Whether activation checkpointing runs a call, or will run it once more."""

from __future__ import annotations

import os
import sys
from types import FrameType

import torch


def recomputing() -> bool:
    """Say whether a backward pass is running: a layer that is called in it is run again by activation checkpointing."""
    return bool(torch._C._current_graph_task_id() != -1)


def under_checkpointing() -> bool:
    """Say whether the code that runs now is under activation checkpointing, which will run it again."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_filename.endswith(CHECKPOINT):
            return True
        frame = frame.f_back
    return False


CHECKPOINT = os.path.join("torch", "utils", "checkpoint.py")


def may_be_recomputed(*, grad_before: bool) -> bool:
    """Say whether a backward pass may run a call again. `grad_before`: gradients were on when the model was called."""
    if torch.is_grad_enabled():  # one kind of checkpointing hooks into the saving of tensors for the backward pass
        return torch._C._autograd._top_saved_tensors_default_hooks(True) is not None
    return grad_before and under_checkpointing()  # the other kind first runs the model without gradients
