"""A progress bar for long work: on a terminal only, and only after two seconds."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Iterator
from typing import Any, TypeVar

_PATIENCE = 2.0  # seconds before a bar appears

T = TypeVar("T")


def tracked(items: Iterable[T], label: str, total: int) -> Iterator[T]:
    """Yield `items`; on a terminal, once they have taken two seconds, with a progress bar on stderr."""
    bar: Any = None
    began = time.monotonic()
    try:
        for done, item in enumerate(items):
            yield item
            if bar is None and sys.stderr.isatty() and time.monotonic() - began > _PATIENCE:
                bar = _bar(label, total)
            if bar is not None:
                bar.update(bar.task_ids[0], completed=done + 1)
    finally:
        if bar is not None:
            bar.stop()


def _bar(label: str, total: int) -> Any:
    from rich.console import Console
    from rich.progress import Progress

    bar = Progress(console=Console(stderr=True), transient=True)
    bar.add_task(label, total=total)
    bar.start()
    return bar
