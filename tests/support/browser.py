"""A headless browser that talks to the loopback alone."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
_QUIET = (
    *(
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-quic",
        "--no-first-run",
        "--disable-background-networking",
    ),
    *("--disable-component-update", "--disable-sync", "--disable-dev-shm-usage"),
)


@contextmanager
def page(folder: Path, **options: Any) -> Iterator[Any]:
    """A page of Playwright in Debian's chromium, its profile in an empty `folder`."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        context = playwright.chromium.launch_persistent_context(
            str(folder), executable_path=CHROMIUM, args=list(_QUIET), chromium_sandbox=False, bypass_csp=True, **options
        )
        try:
            yield context.pages[0] if context.pages else context.new_page()
        finally:
            context.close()
