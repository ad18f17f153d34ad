"""Watching a call as the user makes it, for all who want to know what recurs in it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

from torch import nn

from .finding import has_own_code, layers, layers_in
from .layer import Layers
from .listener import Arguments, Entry, Handle, around
from .unheard import all_hear, unheard

Then: TypeAlias = Callable[[Layers], None]


@dataclass(slots=True)
class _Waiting:
    """Who wants to know what recurs in a call."""

    tell: list[Then]
    knows: bool  # the one who watches it knows the model from earlier calls, and may look at less of it


class _Here(threading.local):
    def __init__(self) -> None:
        self.waiting: dict[nn.Module, _Waiting] = {}  # by model whose call is watched just now


_here = _Here()


def watched(entry: Entry, run: Callable[[], Any], then: Then, *, before: Layers | None = None) -> Any:
    """Return what `run()` does, the rest of a call of a model, and tell `then` what recurred in it.

    However many want to know, the call is made once, and watched once for all who know as little of the model.
    `before` is what an earlier call told.
    """
    model = entry.module
    outer = _here.waiting.get(model)
    if outer is not None and (before is not None or not outer.knows):
        outer.tell.append(then)
        return run()
    own = _here.waiting[model] = _Waiting([then], before is not None)
    try:
        result, found = layers_in(model, (entry.args, entry.kwargs), run, before)
    finally:
        del _here.waiting[model]
        if outer is not None:
            _here.waiting[model] = outer
    for tell in own.tell:
        tell(found)
    return result


def when_reached(model: nn.Module, found: Layers, tell: Callable[[str], None]) -> list[Handle]:
    """Tell the name of a module with code of its own that the watched call did not reach, once a later one does."""
    called = found.seen.called if found.seen is not None else frozenset()
    closed = [f"{layer.name}." for layer in found if layer.seen is None]  # what is inside is its own business
    handles = []
    for name, module in model.named_modules() if called else ():
        if not name or module in called or not has_own_code(module) or name.startswith(tuple(closed)):
            continue
        if getattr(type(module), "forward", nn.Module.forward) is not nn.Module.forward:  # a list is never called
            closed.append(f"{name}.")
            handles.append(around(module, partial(_reached, tell, name)))
    return handles


def _reached(tell: Callable[[str], None], name: str, arguments: Arguments, run: Callable[[Arguments], Any]) -> Any:
    if all_hear():
        tell(name)
    return run(arguments)


def foreseen(entry: Entry) -> Layers | None:
    """Return what a call will show, by a call of our own ahead of it; None where that raises, as the call itself will.

    For whoever has to know it before: the state that a cell is handed first, or which of two modules is the cell.
    """
    try:
        with unheard():
            return layers(entry.module, *entry.args, **entry.kwargs)
    except Exception:  # the call itself will raise it once more, where the user made it
        return None
