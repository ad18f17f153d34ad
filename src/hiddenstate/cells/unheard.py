"""Work of our own that those who listen to a model should not hear, nor those see who watch its operations."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

_numbers = itertools.count()


class Watcher(Protocol):
    """Somebody who sees each operation of a call of the model."""

    ours: bool  # whether what runs just now is our own work


class _Here(threading.local):
    since: int | None = None
    but: int | None = None
    watchers: tuple[Watcher, ...] = ()


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


def watchers() -> tuple[Watcher, ...]:
    """Return who sees the operations of this thread."""
    return _here.watchers


@contextmanager
def watching(watcher: Watcher) -> Iterator[None]:
    """Let `watcher` be told, as long as this lasts, when operations are our own work."""
    before = _here.watchers
    _here.watchers = (*before, watcher)
    try:
        yield
    finally:
        _here.watchers = before


@contextmanager
def seen_as(ours: bool) -> Iterator[None]:
    """Say of what runs inside whether it is our own work, or the model's within our own."""
    before = [(watcher, watcher.ours) for watcher in _here.watchers]
    for watcher, _ in before:
        watcher.ours = ours
    try:
        yield
    finally:
        for watcher, was in before:
            watcher.ours = was
