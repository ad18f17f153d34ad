"""A headless chromium for pages that people look at; tests that need it are skipped where there is none."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

CHROMIUM = next(
    (found for name in ("chromium", "chromium-browser", "google-chrome") if (found := shutil.which(name))), None
)
FLAGS = (
    *("--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync", "--disable-dev-shm-usage"),
)

needs_browser = pytest.mark.skipif(CHROMIUM is None, reason="no chromium on the path: apt-get install chromium")


@contextmanager
def browser(folder: Path, *, offline: bool = True, **options: Any) -> Iterator[Any]:
    """Yield a playwright context of a chromium whose profile is a new folder inside `folder`."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as play:
        context = play.chromium.launch_persistent_context(
            folder / "profile", executable_path=CHROMIUM, headless=True, args=list(FLAGS), **options
        )
        # Whatever a page asks of a network is refused, and heard of as a console error.
        context.set_offline(offline)
        try:
            yield context
        finally:
            context.close()


@contextmanager
def page(folder: Path, **options: Any) -> Iterator[Any]:
    """Yield a page that may talk to servers on the loopback."""
    with browser(folder, offline=False, bypass_csp=True, **options) as context:
        yield context.pages[0] if context.pages else context.new_page()
