"""Watching a call as the user makes it, for all who want to know what recurs in it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, TypeAlias

from torch import nn

from .finding import layers, layers_in
from .layer import Layers
from .listener import Entry
from .unheard import unheard

Then: TypeAlias = Callable[[Layers], None]


class _Here(threading.local):
    def __init__(self) -> None:
        self.waiting: dict[nn.Module, list[Then]] = {}  # by model whose call is watched just now: who wants to know


_here = _Here()


def watched(entry: Entry, run: Callable[[], Any], then: Then, before: Layers | None = None) -> Any:
    """Return what `run()` does, the rest of a call of a model, and tell `then` what recurred in it.

    However many want to know, the call is made once and watched once. `before` is what an earlier call told.
    """
    model = entry.module
    if model in _here.waiting:
        _here.waiting[model].append(then)
        return run()
    _here.waiting[model] = [then]
    try:
        result, found = layers_in(model, (entry.args, entry.kwargs), run, before)
    finally:
        waiting = _here.waiting.pop(model)
    for tell in waiting:
        tell(found)
    return result


def foreseen(entry: Entry) -> Layers | None:
    """Return what a call will show, by a call of our own ahead of it; None where that raises, as the call itself will.

    For whoever has to know it before: the state that a cell is handed first, or which of two modules is the cell.
    """
    try:
        with unheard():
            return layers(entry.module, *entry.args, **entry.kwargs)
    except Exception:  # the call itself will raise it once more, where the user made it
        return None
