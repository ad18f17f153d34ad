"""Calls of our own that those who listen to a model should not hear."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator
from contextlib import contextmanager

_numbers = itertools.count()


class _Here(threading.local):
    since: int | None = None


_here = _Here()


def next_number() -> int:
    """Return a number for somebody who begins to listen, higher than all before."""
    return next(_numbers)


@contextmanager
def unheard() -> Iterator[None]:
    """Let nobody who listens already hear what is called inside, in this thread: it is no run of the user's."""
    before, _here.since = _here.since, next_number()
    try:
        yield
    finally:
        _here.since = before


def unheard_since() -> int | None:
    """Return the number from which on listeners hear calls in this thread; None: all do."""
    return _here.since
