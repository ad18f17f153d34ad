"""Hooks around the calls of a model and its layers, and what they ask of autograd."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from ..cells import Handle, Hook


def before(module: nn.Module, fn: Callable[..., Any]) -> Handle:
    """Call `fn(args, kwargs)` before each call of `module`; it may return new ones."""
    return Hook(lambda module, args, kwargs: fn(args, kwargs)).before(module)


def after(module: nn.Module, fn: Callable[..., Any], *, always: bool = False) -> Handle:
    """Call `fn(args, kwargs, result)` after each call of `module`, with `always` also when it raised."""
    return Hook(lambda module, args, kwargs, result: fn(args, kwargs, result)).after(module, always=always)


def in_backward() -> bool:
    """Say whether a backward pass is running: then a layer is called by activation checkpointing, once more."""
    return torch._C._current_graph_task_id() != -1


def graph_is_freed(tensor: torch.Tensor) -> bool:
    """Say whether the graph behind `tensor` was used up by a backward pass."""
    nodes = [tensor.grad_fn]
    for _ in range(64):  # the first nodes that saved anything decide; deeper ones need not be asked
        if not nodes:
            return False
        node = nodes.pop(0)
        if node is None:
            continue
        for name in dir(node):
            if name.startswith("_saved_"):
                try:
                    getattr(node, name)
                except RuntimeError as error:
                    return "second time" in str(error)
        nodes.extend(inner for inner, _ in node.next_functions)
    return False
