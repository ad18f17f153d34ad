"""Watching a call that the user makes, once for all who want to know what recurs in it."""

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
    """The functions to tell what recurs in a call."""

    tell: list[Then]
    knows: bool  # the call is watched in less detail, since earlier calls of the model were watched


class _ThreadWatches(threading.local):
    """The calls that are being watched in this thread."""

    def __init__(self) -> None:
        self.waiting: dict[nn.Module, _Waiting] = {}  # by the model whose call is being watched


_here = _ThreadWatches()


def watched(entry: OuterCall, run: Callable[[], Any], then: Then, *, before: Layers | None = None) -> Any:
    """Run the rest of a model's call and return its result; call `then` with the layers that were found in it.

    However many ask, the call is made once. It is watched once for all who ask without knowing the model from before;
    `before` is what an earlier call showed.
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
    """A call whose loops started from other values than the model's own."""

    result: Any
    found: Layers
    own: Mapping[OwnStart, Tensor]  # the start values that the model itself made
    replaced: Set[OwnStart]  # the starts for which another value was read
    ends: Mapping[OwnStart, Tensor]  # the last value of each part that is made in a single place


def watched_from(
    entry: OuterCall, run: Callable[[], Any], *, starts: Iterable[OwnStart], put: Put, before: Layers | None
) -> Begun:
    """Run and watch the rest of a call, replacing each of `starts` by what `put` returns for it."""
    from .behavior import Overriding  # imported late: it is much code, and few callers need it

    plan = before.seen.plan if before is not None and before.seen is not None else None
    known = plan is not None and bool(plan.runs)  # then the taps see all states, however short the call is
    mode, told = Overriding(entry.module, starts, put, ends=not known), list[Layers]()
    # Run beneath the trace, which then sees the call as the model's code has it.
    result = mode.beneath(run, lambda inner: watched(entry, inner, told.append, before=before), tapped=known)
    return Begun(result, told[0], mode.met, mode.read, mode.ends)


def when_reached(model: nn.Module, found: Layers, tell: Callable[[str], None]) -> list[Handle]:
    """Call `tell` with the name of each module that the watched call did not reach, when a later call reaches it.

    Only modules with code of the user's own count, since anything may recur in them.
    """
    called = found.seen.called if found.seen is not None else frozenset()
    closed = [f"{layer.name}." for layer in found if layer.seen is None]  # do not look inside known layers
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
    """Return what a call will show, by making the call ahead of it ourselves; None if that raises.

    This is for whoever must know beforehand: the state that a cell is first given, or which of two modules is the cell.
    """
    try:
        with unheard():
            return layers_of_call(entry.module, (entry.args, entry.kwargs))
    except Exception:  # the user's own call will raise it again, where the user made it
        return None
