"""Hooks that leave no trace: not in copies of a model, not in its pickles, not in what torch.compile makes of it."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from functools import wraps
from typing import Any, ParamSpec, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

P = ParamSpec("P")
T = TypeVar("T")


def uncompiled(fn: Callable[P, T]) -> Callable[P, T]:
    """Return a function that runs out of Dynamo's sight: a graph that is being compiled breaks there."""

    @wraps(fn)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        if "torch._dynamo" not in sys.modules:  # nothing is compiled yet, and it takes a second to load
            return fn(*args, **kwargs)
        if not disabled:
            disabled.append(torch.compiler.disable(fn))  # type: ignore[no-untyped-call]
            torch._dynamo.decorators.skip(call)
            torch._dynamo.decorators.skip(_looked_at)
        return disabled[0](*args, **kwargs) if _looked_at() else fn(*args, **kwargs)

    disabled: list[Callable[P, T]] = []
    call._torchdynamo_disable = True  # type: ignore[attr-defined]  # the mark by which Dynamo leaves it alone
    return call


def _looked_at() -> bool:
    """Say whether Dynamo looks at what is run in this thread; that it is loaded does not mean that it does."""
    watching = getattr(torch._C._dynamo.eval_frame, "get_eval_frame_callback", None)
    return watching is None or watching() is not None


class Hook:
    """A function to be called around the calls of a module, out of Dynamo's sight; a copy of it does nothing.

    What a hook keeps on the side, a compiled graph would bake in, and a copy of the model has no part in.

    >>> from copy import deepcopy
    >>> layer, seen = nn.GRU(3, 4), []
    >>> handle = Hook(lambda module, args, kwargs: seen.append(len(args[0]))).before(layer)
    >>> _ = layer(torch.zeros(5, 2, 3)), deepcopy(layer)(torch.zeros(7, 2, 3))
    >>> seen
    [5]
    >>> handle.remove()
    """

    def __init__(self, fn: Callable[..., Any] | None = None) -> None:
        """Call `fn`, or nothing at all."""
        self._fn = fn

    @property
    def observes(self) -> bool:
        """Whether it only looks on, so that a cell may run by a schedule under it; one that does nothing does."""
        return self._fn is None

    def before(self, module: nn.Module) -> Handle:
        """Be called with `(module, args, kwargs)` before each call of `module`, and maybe return new ones."""
        return Handle(module, module.register_forward_pre_hook(self, with_kwargs=True))

    def after(self, module: nn.Module, *, always: bool = False) -> Handle:
        """Be called with `(module, args, kwargs, result)` after each call, with `always` also when it raised."""
        return Handle(module, module.register_forward_hook(self, with_kwargs=True, always_call=always))

    @uncompiled
    def __call__(self, *args: Any) -> Any:
        """Call what was wrapped."""
        return None if self._fn is None else self._fn(*args)

    def __reduce__(self) -> tuple[Any, ...]:
        """Copy and pickle as a hook that does nothing."""
        return Hook, ()


class Handle:
    """Takes a hook off its module again."""

    def __init__(self, module: nn.Module, handle: RemovableHandle) -> None:
        """Note that `module` is hooked."""
        self._module: nn.Module | None = module
        self._handle = handle
        _hooked(module, +1)

    def remove(self) -> None:
        """Take the hook off; safe to repeat."""
        if self._module is not None:
            self._handle.remove()
            _hooked(self._module, -1)
            self._module = None


class _Parameters(dict[str, Any]):
    """The parameters of a hooked module; in a copy or a pickle a plain dict again."""

    def __reduce__(self) -> tuple[Any, ...]:
        return dict, (dict(self),)


_lock = threading.Lock()
_counts: WeakKeyDictionary[nn.Module, int] = WeakKeyDictionary()  # hooks of ours on each module


def _hooked(module: nn.Module, more: int) -> None:
    """Let code that was compiled for a module without hooks not be used for one with hooks, nor the other way round.

    By default torch.compile does not look whether hooks have come since. It does look at the type of a module's dict
    of parameters: with a type of our own in its place while there are hooks, each code is used in its own time only.
    """
    with _lock:
        if count := _counts.pop(module, 0) + more:
            _counts[module] = count
        own = module.__dict__.get("_parameters")
        if count and type(own) is dict:
            module.__dict__["_parameters"] = _Parameters(own)
        elif not count and type(own) is _Parameters:
            module.__dict__["_parameters"] = dict(own)
