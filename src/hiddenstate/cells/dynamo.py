"""Keeping our own code out of torch.compile: a graph would freeze the bookkeeping that it does."""

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
    """Return a function that Dynamo does not trace: a graph that is being compiled breaks there."""

    @wraps(fn)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        if "torch._dynamo" not in sys.modules:  # nothing has been compiled yet, and importing it takes a second
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
    call._torchdynamo_disable = True  # type: ignore[attr-defined]  # Dynamo skips functions with this mark
    return call


def mark_uncompiled() -> None:
    """Mark all these functions if Dynamo is loaded: if marked too late, some of its versions trace them anyway."""
    if "torch._dynamo" in sys.modules:
        for mark in list(_marks):
            mark()
        _marks.clear()


@contextmanager
def eager() -> Iterator[None]:
    """Run code that torch.compile has wrapped as it was written."""
    before = torch._dynamo.eval_frame._stance if "torch._dynamo" in sys.modules else None
    if before is None:
        yield
        return
    with torch.compiler.set_stance("force_eager"):
        yield


def _looked_at() -> bool:
    """Say whether Dynamo traces this thread now; that it is loaded does not mean so."""
    watching = getattr(torch._C._dynamo.eval_frame, "get_eval_frame_callback", None)
    return watching is None or watching() is not None
