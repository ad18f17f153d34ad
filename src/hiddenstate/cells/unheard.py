"""Calls of our own that those who listen to a model should not hear."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator
from contextlib import contextmanager

_numbers = itertools.count()


class _Here(threading.local):
    since: int | None = None
    but: int | None = None


_here = _Here()


def next_number() -> int:
    """Return a number for somebody who begins to listen, higher than all before."""
    return next(_numbers)


@contextmanager
def unheard(but: int | None = None) -> Iterator[None]:
    """Let nobody who listens already hear what is called inside, in this thread: it is no run of the user's.

    Those of rank `but` still do: what is called may need the state that is carried.
    """
    before = _here.since, _here.but
    _here.since, _here.but = next_number(), but
    try:
        yield
    finally:
        _here.since, _here.but = before


def hears(rank: int, number: int) -> bool:
    """Say whether somebody who began to listen at `number` hears calls in this thread."""
    return _here.since is None or number > _here.since or rank == _here.but


def all_hear() -> bool:
    """Say whether everybody does."""
    return _here.since is None
