"""Hearing the calls of a model's recurrent layers, and stepping in where that is wanted.

While somebody listens to a module, its `forward` is an object of ours, so that `layer(...)` and `layer.forward(...)`
are heard alike. Nothing of it is left when the last listener has gone, nor is it in copies or pickles of the model.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from enum import IntEnum
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import nn

from ..errors import HiddenStateError
from .call import Call
from .finding import holders, unwrap
from .layer import Layer
from .uncompiled import mark_uncompiled, uncompiled
from .unheard import all_hear, hears, next_number, seen_as, watchers

Proceed: TypeAlias = Callable[[Call], Call]  # runs a call, and returns it with its result
Around: TypeAlias = Callable[["Arguments", Callable[["Arguments"], Any]], Any]
Arguments: TypeAlias = "tuple[tuple[Any, ...], dict[str, Any]]"


class Rank(IntEnum):
    """Who is told of a call first, and so is outermost: all others happen within what it runs."""

    CARRY = 0  # hands states over; runs marked sequences piece by piece
    OBSERVE = 1
    ACCELERATE = 2


@dataclass(frozen=True, slots=True, eq=False)
class Entry:
    """Where a model is called from outside: the model itself, or a module in it that holds layers or is one."""

    module: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


class Listener:
    """Somebody who hears the calls of a model's recurrent layers; a subclass says what happens around them."""

    rank = Rank.OBSERVE

    @property
    def observes(self) -> bool:
        """Whether it only looks on, so that a cell may run by a schedule and be shown its steps afterwards."""
        return False

    def model_call(self, entry: Entry, run: Callable[[], Any]) -> Any:
        """Be there while the model is called from outside, or a module in it: return what `run()` does."""
        return run()

    def layer_call(self, call: Call, proceed: Proceed) -> Call:
        """Be there while a layer is called: return `proceed(call)`, or what else should come of it."""
        return proceed(call)

    def recompute(self, call: Call, proceed: Proceed) -> Call:
        """Be there while a layer runs once more within a backward pass, as under activation checkpointing."""
        return proceed(call)


@dataclass(slots=True, eq=False)
class Handle:
    """Ends the listening; safe to repeat."""

    seats: list[tuple[_Forward, _Seat]]

    def remove(self) -> None:
        """Take away all that was put in the modules."""
        seats, self.seats = self.seats, []
        for forward, seat in seats:
            _leave(forward, seat)


def listen(model: nn.Module, found: Iterable[Layer], listener: Listener) -> Handle:
    """Let `listener` hear the calls of `model`, and of `found`, its layers.

    >>> class Count(Listener):
    ...     calls = 0
    ...     def layer_call(self, call, proceed):
    ...         self.calls += 1
    ...         return proceed(call)
    >>> model, count = torch.nn.Sequential(torch.nn.GRU(3, 4)), Count()
    >>> handle = listen(model, hs.layers(model), count)
    >>> _ = model(torch.randn(5, 2, 3)), model[0].forward(input=torch.randn(5, 2, 3))
    >>> handle.remove()
    >>> _ = model(torch.randn(5, 2, 3))
    >>> count.calls
    2
    """
    found = list(found)
    wraps = [(layer.module, partial(_on_layer, listener, layer)) for layer in found]
    inside, root = {layer.module for layer in found}, unwrap(model)
    outside = dict.fromkeys([*([] if root in inside else [root]), *holders(root, found)])
    wraps += [(module, partial(_on_model, listener, module)) for module in outside]
    return Handle([_enter(module, _Seat(listener.rank, wrap, listener)) for module, wrap in wraps])


def around(module: nn.Module, wrap: Around) -> Handle:
    """Run `wrap((args, kwargs), run)` in place of every call of any module; `run` is the call itself."""
    return Handle([_enter(module, _Seat(Rank.OBSERVE, wrap))])


def listeners(module: nn.Module) -> list[Listener]:
    """Return who listens to a module."""
    stand_in = module.__dict__.get("forward")
    if not isinstance(stand_in, _Forward):
        return []
    return [seat.listener for seat in stand_in.seats if seat.listener is not None]


def attributes(module: nn.Module) -> dict[str, Any]:
    """Return a module's own attributes, without what stands there while somebody listens."""
    own = module.__dict__
    if not isinstance(own.get("forward"), _StandIn):
        return own
    kept = {name: value for name, value in own.items() if not isinstance(value, _StandIn)}
    before = own["forward"].before
    return kept if before is None else {**kept, "forward": before}


def recomputing() -> bool:
    """Say whether a backward pass is running: then a layer is called by activation checkpointing, once more."""
    return bool(torch._C._current_graph_task_id() != -1)


def may_be_recomputed(*, grad_before: bool) -> bool:
    """Say whether a call may be run again in a backward pass; `grad_before`: the model was called with gradients on."""
    if torch.is_grad_enabled():  # one form of checkpointing steps in where tensors are saved for backward
        return torch._C._autograd._top_saved_tensors_default_hooks(True) is not None
    return grad_before  # the other one runs the model without gradients first


@dataclass(frozen=True, slots=True, eq=False)
class _Seat:
    """A place among those who hear a module."""

    rank: Rank
    wrap: Around
    listener: Listener | None = None
    number: int = field(default_factory=next_number)  # in the order in which they began to listen


class _Here(threading.local):
    def __init__(self) -> None:
        self.under_way: set[int] = set()  # listeners that are within a call of their model


_here = _Here()
_lock = threading.RLock()


def _on_model(listener: Listener, module: nn.Module, arguments: Arguments, run: Callable[[Arguments], Any]) -> Any:
    if id(listener) in _here.under_way or recomputing():
        return run(arguments)
    return _from_outside(listener, Entry(module, *arguments), lambda: run(arguments))


def _on_layer(listener: Listener, layer: Layer, arguments: Arguments, run: Callable[[Arguments], Any]) -> Any:
    def proceed(call: Call) -> Call:
        return call.returned(run((call.args, call.kwargs)))

    call = Call(layer, *arguments)
    if recomputing():
        return listener.recompute(call, proceed).result
    if id(listener) in _here.under_way:
        return listener.layer_call(call, proceed).result
    entry = Entry(layer.module, *arguments)
    return _from_outside(listener, entry, lambda: listener.layer_call(call, proceed).result)


def _from_outside(listener: Listener, entry: Entry, run: Callable[[], Any]) -> Any:
    _here.under_way.add(id(listener))
    try:
        return listener.model_call(entry, run)
    finally:
        _here.under_way.discard(id(listener))


class _StandIn:
    """Something of ours in a module's own attributes; in a copy that carries it along, what it stands for."""

    def __init__(self, module: nn.Module, name: str) -> None:
        self.module, self.name = module, name
        self.before = module.__dict__.get(name)  # where the user has put something in this place too
        self.real: Any = getattr(module, name, None)

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (self.module, self.name)

    def __getattr__(self, name: str) -> Any:  # a signature, a docstring: those of what it stands for
        if name in ("real", "__deepcopy__"):
            raise AttributeError(name)
        return getattr(self.real, name)


class _Forward(_StandIn):
    """The `forward` of a module that is heard."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module, "forward")
        self.seats: tuple[_Seat, ...] = ()
        self.__wrapped__ = self.real

    @uncompiled
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        seats = self.seats
        if not all_hear():
            seats = tuple(seat for seat in seats if hears(seat.rank, seat.number))
        return self._within(seats, (args, kwargs))

    def _within(self, seats: tuple[_Seat, ...], arguments: Arguments) -> Any:
        if not watchers():
            return self._next(seats, arguments)
        with seen_as(ours=bool(seats)):
            return self._next(seats, arguments)

    def _next(self, seats: tuple[_Seat, ...], arguments: Arguments) -> Any:
        if not seats:
            return self.real(*arguments[0], **arguments[1])
        return seats[0].wrap(arguments, partial(self._within, seats[1:]))


class _State(_StandIn):
    """The `__getstate__` of a module that is heard: what copies and pickles are made of, without what is ours."""

    def __call__(self) -> Any:
        # Before Python 3.11 there is no such method, and the attributes are the state.
        state = self.module.__dict__ if self.real is None else self.real()
        if not isinstance(state, dict):
            return state
        kept = {name: value for name, value in state.items() if not isinstance(value, _StandIn)}
        before = {name: value.before for name, value in state.items() if isinstance(value, _StandIn)}
        return kept | {name: value for name, value in before.items() if value is not None}


class _Replica(_StandIn):
    """Refuses what `nn.DataParallel` does to a module for each of its devices."""

    def __call__(self) -> Any:
        who = ", ".join(sorted({type(listener).__name__ for listener in listeners(self.module)})) or "somebody"
        raise HiddenStateError(
            f"nn.DataParallel copies the model for every call, and {who}, attached to {type(self.module).__name__}, "
            f"would hear none of its copies. Use DistributedDataParallel, or close what is attached first."
        )


_STAND_INS = {"__getstate__": _State, "_replicate_for_data_parallel": _Replica}


def _enter(module: nn.Module, seat: _Seat) -> tuple[_Forward, _Seat]:
    mark_uncompiled()
    with _lock:
        own = module.__dict__
        if not isinstance(own.get("forward"), _Forward):
            made: dict[str, Any] = {name: kind(module, name) for name, kind in _STAND_INS.items()}
            own.update(made, forward=_Forward(module))
        forward: _Forward = own["forward"]
        forward.seats = tuple(sorted((*forward.seats, seat), key=lambda other: other.rank))
        return forward, seat


def _leave(forward: _Forward, seat: _Seat) -> None:
    with _lock:
        forward.seats = tuple(other for other in forward.seats if other is not seat)
        own = forward.module.__dict__
        if forward.seats or own.get("forward") is not forward:
            return  # where somebody has put a forward of their own around ours, ours lets everything pass
        for name in ("forward", *_STAND_INS):
            before = own.pop(name).before if isinstance(own.get(name), _StandIn) else None
            if before is not None:
                own[name] = before
