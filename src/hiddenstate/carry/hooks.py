"""Hooks that leave no trace: not in copies of a model, not in its pickles, not after they are closed."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle


class Hook:
    """A callable hook that a deep copy or a pickle of the model replaces by one that does nothing."""

    def __init__(self, fn: Callable[..., Any]) -> None:
        """Wrap `fn`."""
        self._fn = fn
        self._shielded = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call what was wrapped, out of Dynamo's sight: it keeps state on the side, which a graph would bake in."""
        if not self._shielded and "torch._dynamo" in sys.modules:  # not before: it takes a second to load
            self._fn, self._shielded = torch.compiler.disable(self._fn), True  # type: ignore[no-untyped-call]
            torch._dynamo.decorators.skip(Hook.__call__)
        return self._fn(*args, **kwargs)

    def __reduce__(self) -> tuple[Any, ...]:
        """Copy and pickle as a hook that does nothing."""
        return Hook, (nothing,)


# The mark by which Dynamo leaves a function alone.
Hook.__call__._torchdynamo_disable = True  # type: ignore[attr-defined]


def nothing(*args: Any, **kwargs: Any) -> None:
    """Do nothing, whatever a hook is called with."""


def before(module: nn.Module, fn: Callable[..., Any]) -> RemovableHandle:
    """Call `fn(args, kwargs)` before each call of `module`; it may return new ones."""
    hook = Hook(lambda module, args, kwargs: fn(args, kwargs))
    return module.register_forward_pre_hook(hook, with_kwargs=True)


def after(module: nn.Module, fn: Callable[..., Any], *, always: bool = False) -> RemovableHandle:
    """Call `fn(args, kwargs, result)` after each call of `module`, with `always` also when it raised."""
    hook = Hook(lambda module, args, kwargs, result: fn(args, kwargs, result))
    return module.register_forward_hook(hook, with_kwargs=True, always_call=always)


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
