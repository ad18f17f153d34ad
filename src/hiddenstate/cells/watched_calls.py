"""Watching a call as the user makes it, for all who want to know what recurs in it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Set
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

from torch import Tensor, nn

from .discovery import Layers, has_own_code, layers_in, layers_of_call
from .listener import Handle, OuterCall, all_hear, around, unheard
from .signature import Arguments

if TYPE_CHECKING:
    from .behavior import OwnStart, Put

Then: TypeAlias = Callable[[Layers], None]


@dataclass(slots=True)
class _Waiting:
    """Those who want to know what recurs in a call."""

    tell: list[Then]
    knows: bool  # the one who watches it knows the model from earlier calls, and may look at less of it


class _ThreadWatches(threading.local):
    """The calls that are watched in this thread."""

    def __init__(self) -> None:
        self.waiting: dict[nn.Module, _Waiting] = {}  # by model whose call is watched just now


_here = _ThreadWatches()


def watched(entry: OuterCall, run: Callable[[], Any], then: Then, *, before: Layers | None = None) -> Any:
    """Run the rest of a call of a model and return its result; tell `then` which layers were found in it.

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


@dataclass(frozen=True, slots=True, eq=False)
class Begun:
    """A call of a model whose loops began with something else than what they start from by themselves."""

    result: Any
    found: Layers
    own: Mapping[OwnStart, Tensor]  # what the model itself made for it
    replaced: Set[OwnStart]  # where something else was read
    ends: Mapping[OwnStart, Tensor]  # what was made last where a part is made, where that is one place


def watched_from(
    entry: OuterCall, run: Callable[[], Any], *, starts: Iterable[OwnStart], put: Put, before: Layers | None
) -> Begun:
    """Let the rest of a call go on, with what `put` returns in the place of each of `starts`, and watch it."""
    from .behavior import Overriding  # much code, which few need at once

    plan = before.seen.plan if before is not None and before.seen is not None else None
    known = plan is not None and bool(plan.runs)  # then all that is made is seen, however short the call
    mode, told = Overriding(entry.module, starts, put, ends=not known), list[Layers]()
    # Beneath the trace, which so sees the call as the model's code has it.
    result = mode.beneath(run, lambda inner: watched(entry, inner, told.append, before=before), tapped=known)
    return Begun(result, told[0], mode.met, mode.read, mode.ends)


def when_reached(model: nn.Module, found: Layers, tell: Callable[[str], None]) -> list[Handle]:
    """Call `tell` with the name of a module that the watched call did not reach, once a later call reaches it.

    Only modules with code of the user's own count: there anything may recur.
    """
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


def foreseen(entry: OuterCall) -> Layers | None:
    """Return what a call will show, by a call of our own ahead of it; None where that raises, as the call itself will.

    For whoever has to know it before: the state that a cell is handed first, or which of two modules is the cell.
    """
    try:
        with unheard():
            return layers_of_call(entry.module, (entry.args, entry.kwargs))
    except Exception:  # the call itself will raise it once more, where the user made it
        return None
