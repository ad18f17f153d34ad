"""Keeping our own code out of torch.compile: it keeps things on the side, which a graph would bake in."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import ParamSpec, TypeVar
from weakref import WeakSet

import torch

P = ParamSpec("P")
T = TypeVar("T")
_marks: WeakSet[Callable[[], None]] = WeakSet()


def uncompiled(fn: Callable[P, T]) -> Callable[P, T]:
    """Return a function that runs out of Dynamo's sight: a graph that is being compiled breaks there."""

    @wraps(fn)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        if "torch._dynamo" not in sys.modules:  # nothing is compiled yet, and it takes a second to load
            return fn(*args, **kwargs)
        if not disabled:
            mark()
        return disabled[0](*args, **kwargs) if _looked_at() else fn(*args, **kwargs)

    def mark() -> None:
        if not disabled:
            disabled.append(torch.compiler.disable(fn))  # type: ignore[no-untyped-call]
            torch._dynamo.decorators.skip(call)
            torch._dynamo.decorators.skip(_looked_at)

    disabled: list[Callable[P, T]] = []
    _marks.add(mark)
    call._torchdynamo_disable = True  # type: ignore[attr-defined]  # the mark by which Dynamo leaves it alone
    return call


def mark_uncompiled() -> None:
    """Mark all such functions, if Dynamo is loaded: some versions of it look into them where that is done too late."""
    if "torch._dynamo" in sys.modules:
        for mark in list(_marks):
            mark()
        _marks.clear()


@contextmanager
def eager() -> Iterator[None]:
    """Run what torch.compile has wrapped as it was written."""
    before = torch._dynamo.eval_frame._stance if "torch._dynamo" in sys.modules else None
    if before is None:
        yield
        return
    with torch.compiler.set_stance("force_eager"):
        yield


def _looked_at() -> bool:
    """Say whether Dynamo looks at what is run in this thread; that it is loaded does not mean that it does."""
    watching = getattr(torch._C._dynamo.eval_frame, "get_eval_frame_callback", None)
    return watching is None or watching() is not None
