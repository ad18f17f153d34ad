"""Graphs of our own that hooks on saved tensors do not see."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


@contextmanager
def unsaved() -> Iterator[None]:
    """Keep what is run inside from whoever keeps tensors for a backward pass, as activation checkpointing does."""
    autograd: Any = torch._C._autograd
    hooks = []
    while (top := autograd._top_saved_tensors_default_hooks(True)) is not None:
        hooks.append(top)
        autograd._pop_saved_tensors_default_hooks()
    try:
        yield
    finally:
        for hook in reversed(hooks):
            autograd._push_saved_tensors_default_hooks(*hook)
