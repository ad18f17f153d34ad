"""Hooks on the modules of a model, shared by all recordings that watch them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol
from weakref import WeakKeyDictionary

from torch import nn

from ..cells import Hook
from ..unrolling import unseen
from .calls import Intercept
from .takes import Options

_lock = threading.RLock()
_watches: WeakKeyDictionary[nn.Module, Watch] = WeakKeyDictionary()


class Scene(Protocol):
    """How one kind of module is watched: what happens around each of its calls."""

    def intercepted(self, frame: Frame) -> Intercept | None:
        """Return what steps in while the call runs."""

    def begin(self, frame: Frame) -> None:
        """Note that a call begins."""

    def end(self, frame: Frame, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        """Tell the listeners what the call did."""

    def fail(self, frame: Frame) -> None:
        """Put away what a call that raised has left."""


class Listener(Protocol):
    """A recording's interest in one module."""

    options: Options

    def hears(self) -> bool:
        """Say whether calls in this thread concern it."""


@dataclass(slots=True, eq=False)
class Frame:
    """One call of a watched module that is under way."""

    watch: Watch
    listeners: list[Any]
    mode: Intercept | None = None
    notes: list[Any] = field(default_factory=list)


class _Local(threading.local):
    def __init__(self) -> None:
        self.frames: list[Frame] = []


_local = _Local()


class _Watching(Hook):
    """A hook of a watch: it never changes what the module takes or gives."""

    def __init__(self, fn: Callable[..., None], watch: Watch) -> None:
        super().__init__(fn)
        self._watch = watch

    @property
    def observes(self) -> bool:
        """Whether a cell under this hook may run by a schedule: its steps are then seen apart from its graph."""
        return not any(listener.options.grads for listener in self._watch.listeners)


class Watch:
    """The hooks on one module, and everybody who listens to them."""

    def __init__(self, module: nn.Module, scene: Scene) -> None:
        """Hook into `module`."""
        self.scene = scene
        self.listeners: list[Listener] = []
        self._handles = (
            _Watching(self._before, self).before(module),
            _Watching(self._after, self).after(module, always=True),
        )

    def remove(self) -> None:
        """Take the hooks off the module."""
        for handle in self._handles:
            handle.remove()

    def _before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        active = [listener for listener in self.listeners if listener.hears()]
        if not active or unseen():
            return
        frame = Frame(self, active)
        self.scene.begin(frame)
        frame.mode = self.scene.intercepted(frame)
        _local.frames.append(frame)
        if frame.mode is not None:
            frame.mode.__enter__()  # type: ignore[no-untyped-call]

    def _after(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        if not any(frame.watch is self for frame in _local.frames):
            return
        while _local.frames[-1].watch is not self:
            _leave()
        frame = _leave()
        if result is None:  # torch calls this hook also after an exception, and then there is no result
            self.scene.fail(frame)
        else:
            self.scene.end(frame, args, kwargs, result)


def _leave() -> Frame:
    frame = _local.frames.pop()
    if frame.mode is not None:
        frame.mode.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        frame.mode = None
    return frame


def unwind(listeners: list[Any]) -> None:
    """Leave the calls of these listeners that were cut off, as by a KeyboardInterrupt."""
    while _local.frames and any(listener in listeners for listener in _local.frames[-1].listeners):
        frame = _leave()
        frame.watch.scene.fail(frame)


def watch(module: nn.Module, scene: Scene, listener: Listener) -> None:
    """Let `listener` hear of the calls of `module`."""
    with _lock:
        found = _watches.get(module)
        if found is None:
            found = _watches[module] = Watch(module, scene)
        found.listeners = [*found.listeners, listener]


def unwatch(module: nn.Module, listener: Listener) -> None:
    """Let `listener` hear no more; the last to go takes the hooks along."""
    with _lock:
        found = _watches[module]
        found.listeners = [other for other in found.listeners if other is not listener]
        if not found.listeners:
            found.remove()
            del _watches[module]
