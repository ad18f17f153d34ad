"""Hooks that only look on: they keep no cell from running by a schedule, and see every step all the same.

Such a hook says so by an attribute `observes` that is true. After a schedule has run, its steps are run once more in
the plain loop, for the observers' eyes only; outputs and gradients are the schedule's, as if nobody had looked.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor, nn

from .twins import members


class _Here(threading.local):
    unseen: bool = False
    order: Tensor | None = None


_here = _Here()


def hooks(module: nn.Module) -> list[object]:
    """Return all hooks that a call of `module`, or its backward pass, would run."""
    stores = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)
    return [hook for store in stores for hook in store.values()]


def observes(hook: object) -> bool:
    """Say whether a hook only looks on."""
    return bool(getattr(hook, "observes", False))


def observed(module: nn.Module) -> bool:
    """Say whether anybody looks on."""
    return any(observes(hook) for member in members(module) for hook in hooks(member))


def unseen() -> bool:
    """Say whether observers should look away: a cell is being traced, and nothing of it is a step of a run."""
    return _here.unseen


def row_order() -> Tensor | None:
    """Return the user's row at each place of the batch that a cell is being called with; None: they are in order."""
    return _here.order


@contextmanager
def looking_away() -> Iterator[None]:
    """Let observers look away."""
    before, _here.unseen = _here.unseen, True
    try:
        yield
    finally:
        _here.unseen = before


@contextmanager
def in_order(order: Tensor | None) -> Iterator[None]:
    """Tell observers in which order the rows are."""
    before, _here.order = _here.order, order
    try:
        yield
    finally:
        _here.order = before
