"""Waiting for another process or thread: the only place of the tests that lets time pass."""

from __future__ import annotations

import time
from collections.abc import Callable


def wait_until(done: Callable[[], object], *, seconds: float = 15) -> None:
    """Ask again and again until `done()` is true, and fail where it is not so within these seconds."""
    end = time.monotonic() + seconds
    while not done():
        if time.monotonic() > end:
            raise TimeoutError(f"it did not happen within {seconds} s")
        time.sleep(0.01)


def let_pass(seconds: float) -> None:
    """Let time pass where that is what is tried: a lock that is held, a worker that is paused."""
    time.sleep(seconds)
