"""Listeners that are told of the calls of a model's recurrent layers, and may change them.

While a module has a listener, its `forward` attribute is an object of ours, so that `layer(...)` and
`layer.forward(...)` are both heard. The attribute goes when the last listener leaves. Copies and pickles of the model
never contain it.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import IntEnum
from functools import partial
from types import FrameType
from typing import Any, Protocol, TypeAlias, runtime_checkable

from torch import nn

from .._compiling import recomputing
from ..errors import HiddenStateError
from .dynamo import mark_uncompiled, uncompiled
from .layer import Call, Layer
from .signature import Arguments
from .wrappers import unwrap

Proceed: TypeAlias = Callable[[Call], Call]  # runs the rest of a call, and returns the call with its result
LetsPass: TypeAlias = Callable[[tuple[Any, ...], dict[str, Any]], bool]
Around: TypeAlias = Callable[[Arguments, Callable[[Arguments], Any]], Any]


class Rank(IntEnum):
    """The order of listeners, outermost first: each one wraps the calls of those after it."""

    CARRY = 0  # hands states in; runs marked sequences piece by piece
    OBSERVE = 1
    ACCELERATE = 2


@dataclass(frozen=True, slots=True, eq=False)
class OuterCall:
    """A call from outside the model: of the model itself, or of a module in it that holds layers or is one."""

    module: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    given: Arguments = ((), {})  # the caller's arguments, before any listener changed them


class Listener:
    """A listener to the calls of a model's recurrent layers. Subclasses override what they want to wrap."""

    rank = Rank.OBSERVE
    title = ""  # the name that users know it by, if that is not the name of its class

    @property
    def observes(self) -> bool:
        """Whether it only observes; then a cell may run by a schedule and show its steps afterwards."""
        return False

    def lets_pass(self, layer: Layer) -> LetsPass | None:
        """Return a quick check of the arguments of a call, which is True if this listener has nothing to do there."""
        return None

    def model_call(self, entry: OuterCall, run: Callable[[], Any]) -> Any:
        """Wrap a call of the model, or of a module in it, from outside. Return the result, usually `run()`."""
        return run()

    def layer_call(self, call: Call, proceed: Proceed) -> Call:
        """Wrap a call of a layer. Return `proceed(call)`, or the call with another result."""
        return proceed(call)

    def recompute(self, call: Call, proceed: Proceed) -> Call:
        """Wrap a layer's second run, which activation checkpointing makes within a backward pass."""
        return proceed(call)


@dataclass(slots=True, eq=False)
class Handle:
    """Stops a listener with `remove`, which may be called repeatedly."""

    seats: list[tuple[_Forward, _Seat]]

    def remove(self) -> None:
        """Remove the listener from all modules it was added to."""
        seats, self.seats = self.seats, []
        for forward, seat in seats:
            _leave(forward, seat)


def listen(model: nn.Module, found: Iterable[Layer], listener: Listener) -> Handle:
    """Tell `listener` of the calls of `model` and of its layers `found`, until the handle is removed.

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
    seats = [
        (each.module, _Seat(listener.rank, partial(_on_layer, listener, each), listener, listener.lets_pass(each)))
        for each in found
    ]
    inside, root = {layer.module for layer in found}, unwrap(model)
    outside = dict.fromkeys([*([] if root in inside else [root]), *_holders(root, found)])
    seats += [(each, _Seat(listener.rank, partial(_on_model, listener, each), listener)) for each in outside]
    return Handle([_enter(module, seat) for module, seat in seats])


def around(module: nn.Module, wrap: Around, *, rank: Rank = Rank.OBSERVE) -> Handle:
    """Call `wrap((args, kwargs), run)` instead of the module at each of its calls; `run` is the call itself."""
    return Handle([_enter(module, _Seat(rank, wrap))])


def listeners(module: nn.Module) -> list[Listener]:
    """Return the listeners of a module."""
    stand_in = module.__dict__.get("forward")
    if not isinstance(stand_in, _Forward):
        return []
    return [seat.listener for seat in stand_in.seats if seat.listener is not None]


def attributes(module: nn.Module) -> dict[str, Any]:
    """Return a module's own attributes, without those that are ours while it has listeners."""
    own = module.__dict__
    if not isinstance(own.get("forward"), _StandIn):
        return own
    kept = {name: value for name, value in own.items() if not isinstance(value, _StandIn)}
    before = own["forward"].before
    return kept if before is None else {**kept, "forward": before}


_numbers = itertools.count()  # each listener gets the next number, so later ones have higher numbers


class Watcher(Protocol):
    """A trace or a tap: it sees each operation in a call of the model."""

    ours: bool  # whether the operations that run now are this library's own work


class Heeds(Watcher, Protocol):
    """An object that wants to know each operation as the model calls it."""

    def heed(self, func: Any, args: tuple[Any, ...], kwargs: Any, result: Any, frame: FrameType) -> None:
        """Take note of an operation that was called from `frame`."""


@runtime_checkable
class Tells(Watcher, Protocol):
    """A watcher that passes what it sees on to another object."""

    way: Heeds | None


class _ThreadHearing(threading.local):
    """Which listeners and watchers are active in this thread."""

    def __init__(self) -> None:
        self.since: int | None = None  # within `unheard`: listeners with numbers below this one hear nothing
        self.but: int | None = None  # except listeners of this rank
        self.watchers: tuple[Watcher, ...] = ()
        self.given: Arguments = ((), {})  # the arguments of the innermost module call
        self.under_way: set[int] = set()  # ids of listeners that are within a call of their model


_here = _ThreadHearing()


@contextmanager
def unheard(but: int | None = None) -> Iterator[None]:
    """Make calls in this thread silent for the present listeners, since they are not the user's calls.

    Listeners of rank `but` still hear them: the call may need the carried state.
    """
    before = _here.since, _here.but
    _here.since, _here.but = next(_numbers), but
    try:
        yield
    finally:
        _here.since, _here.but = before


def all_hear() -> bool:
    """Say whether no listener is silenced in this thread."""
    return _here.since is None


def watchers() -> tuple[Watcher, ...]:
    """Return the watchers of this thread's operations."""
    return _here.watchers


def tells_now() -> Tells | None:
    """Return the first watcher of this thread that passes on what it sees, or None."""
    return next((each for each in _here.watchers if isinstance(each, Tells)), None)


@contextmanager
def watching(watcher: Watcher) -> Iterator[None]:
    """Tell `watcher`, within this context, which operations are this library's own work."""
    before = _here.watchers
    _here.watchers = (*before, watcher)
    try:
        yield
    finally:
        _here.watchers = before


@dataclass(frozen=True, slots=True, eq=False)
class _Seat:
    """The place of one listener at a module: its rank, its number, and how it wraps a call."""

    rank: Rank
    wrap: Around
    listener: Listener | None = None
    lets_pass: LetsPass | None = None
    number: int = field(default_factory=lambda: next(_numbers))  # in the order in which they began to listen


_lock = threading.RLock()


def _on_model(listener: Listener, module: nn.Module, arguments: Arguments, run: Callable[[Arguments], Any]) -> Any:
    if id(listener) in _here.under_way or recomputing():
        return run(arguments)
    return _from_outside(listener, OuterCall(module, *arguments, _here.given), lambda: run(arguments))


def _on_layer(listener: Listener, layer: Layer, arguments: Arguments, run: Callable[[Arguments], Any]) -> Any:
    def proceed(call: Call) -> Call:
        return call.returned(run((call.args, call.kwargs)))

    call = Call(layer, *arguments)
    if recomputing():
        return listener.recompute(call, proceed).result
    if id(listener) in _here.under_way:
        return listener.layer_call(call, proceed).result
    entry = OuterCall(layer.module, *arguments, _here.given)
    return _from_outside(listener, entry, lambda: listener.layer_call(call, proceed).result)


def _from_outside(listener: Listener, entry: OuterCall, run: Callable[[], Any]) -> Any:
    _here.under_way.add(id(listener))
    try:
        return listener.model_call(entry, run)
    finally:
        _here.under_way.discard(id(listener))


class _StandIn:
    """An attribute of ours that stands in for a module's own; a copy of the module gets the module's own."""

    def __init__(self, module: nn.Module, name: str) -> None:
        self.module, self.name = module, name
        self.before = module.__dict__.get(name)  # set if the user replaced this attribute on the instance
        self.real: Any = getattr(module, name, None)

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (self.module, self.name)

    def __getattr__(self, name: str) -> Any:  # the signature, docstring and so on of the attribute it stands in for
        if name in ("real", "__deepcopy__"):
            raise AttributeError(name)
        return getattr(self.real, name)


class _Forward(_StandIn):
    """The `forward` of a module that has listeners."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module, "forward")
        self.seats: tuple[_Seat, ...] = ()
        self.lets_pass: LetsPass | None = None  # of the only one who hears it
        self.__wrapped__ = self.real

    @uncompiled
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        lets_pass, seats = self.lets_pass, self.seats
        if lets_pass is not None and not _here.watchers and lets_pass(args, kwargs):
            return self.real(*args, **kwargs)
        if _here.since is not None:
            seats = tuple(seat for seat in seats if seat.number > _here.since or seat.rank == _here.but)
        before, _here.given = _here.given, (args, kwargs)
        try:
            return self._within(seats, (args, kwargs))
        finally:
            _here.given = before

    def _within(self, seats: tuple[_Seat, ...], arguments: Arguments) -> Any:
        """Run the rest of a call, and tell all watchers whether this library or the model runs it."""
        watchers, ours = _here.watchers, bool(seats)
        if not watchers:
            return self._next(seats, arguments)
        before = [watcher.ours for watcher in watchers]
        for watcher in watchers:
            watcher.ours = ours
        try:
            return self._next(seats, arguments)
        finally:
            for watcher, was in zip(watchers, before, strict=True):
                watcher.ours = was

    def _next(self, seats: tuple[_Seat, ...], arguments: Arguments) -> Any:
        if not seats:
            return self.real(*arguments[0], **arguments[1])
        return seats[0].wrap(arguments, partial(self._within, seats[1:]))


class _GetState(_StandIn):
    """The `__getstate__` of a module that has listeners: copies and pickles get the module without our attributes."""

    def __call__(self) -> Any:
        # Before Python 3.11 objects have no `__getstate__`; their attributes are the state.
        state = self.module.__dict__ if self.real is None else self.real()
        if not isinstance(state, dict):
            return state
        kept = {name: value for name, value in state.items() if not isinstance(value, _StandIn)}
        before = {name: value.before for name, value in state.items() if isinstance(value, _StandIn)}
        return kept | {name: value for name, value in before.items() if value is not None}


class _Replica(_StandIn):
    """Raises when `nn.DataParallel` copies the module to its devices."""

    def __call__(self) -> Any:
        heard_by = {listener.title or type(listener).__name__ for listener in listeners(self.module)}
        who = ", ".join(sorted(heard_by)) or "hiddenstate"
        raise HiddenStateError(
            f"nn.DataParallel copies the model for every call, and {who}, attached to {type(self.module).__name__}, "
            f"would hear none of its copies. Use DistributedDataParallel, or close what is attached first."
        )


_STAND_INS = {"__getstate__": _GetState, "_replicate_for_data_parallel": _Replica}


def _enter(module: nn.Module, seat: _Seat) -> tuple[_Forward, _Seat]:
    mark_uncompiled()
    with _lock:
        own = module.__dict__
        if not isinstance(own.get("forward"), _Forward):
            made: dict[str, Any] = {name: kind(module, name) for name, kind in _STAND_INS.items()}
            own.update(made, forward=_Forward(module))
        forward: _Forward = own["forward"]
        _seat(forward, tuple(sorted((*forward.seats, seat), key=lambda other: other.rank)))
        return forward, seat


def _seat(forward: _Forward, seats: tuple[_Seat, ...]) -> None:
    forward.lets_pass = None  # not before there is one seat, nor after there are two
    forward.seats = seats
    forward.lets_pass = seats[0].lets_pass if len(seats) == 1 else None


def _leave(forward: _Forward, seat: _Seat) -> None:
    with _lock:
        _seat(forward, tuple(other for other in forward.seats if other is not seat))
        own = forward.module.__dict__
        if forward.seats or own.get("forward") is not forward:
            return  # the user has wrapped our forward in another one: leave ours in place, without listeners
        for name in ("forward", *_STAND_INS):
            before = own.pop(name).before if isinstance(own.get(name), _StandIn) else None
            if before is not None:
                own[name] = before


def _holders(model: nn.Module, found: Iterable[Layer]) -> list[nn.Module]:
    """Return the modules on the paths from a model to its layers, the model itself first."""
    inside = {layer.module for layer in found}
    known: dict[nn.Module, bool] = {}

    def holds(module: nn.Module) -> bool:
        if module in inside:
            return True
        if module not in known:
            known[module] = False  # set before the search, which so ends if modules hold each other
            known[module] = any([holds(child) for child in module._modules.values() if child is not None])
        return known[module]

    holds(model)
    return [module for module, there in known.items() if there]
