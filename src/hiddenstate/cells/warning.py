"""Warnings that point at the user's own line, however deep inside a call of the model they are raised."""

from __future__ import annotations

import sys
import warnings

_BETWEEN = {"hiddenstate", "torch", "functools", "contextlib"}


def warn(message: str, category: type[Warning]) -> None:
    """Warn with the innermost line of the stack that is neither ours nor torch's."""
    frame, level = sys._getframe(1), 2
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] in _BETWEEN:
        frame, level = frame.f_back, level + 1
    warnings.warn(message, category, stacklevel=level)
