"""The folder for cached files, all of which can be made again."""

from __future__ import annotations

import os
import sys
from pathlib import Path


def cache_folder() -> Path:
    """Return `HIDDENSTATE_CACHE`, or the platform's folder for caches; a RuntimeError where there is no home at all."""
    if chosen := os.environ.get("HIDDENSTATE_CACHE"):
        return Path(chosen)
    if home := os.environ.get("XDG_CACHE_HOME"):
        return Path(home) / "hiddenstate"
    return Path.home() / ("Library/Caches" if sys.platform == "darwin" else ".cache") / "hiddenstate"
