"""Calls of recorded layers that are under way, and what happens inside them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from .kernel_call import Intercept


@dataclass(slots=True, eq=False)
class Frame:
    """One call of a layer, as one recording hears it."""

    module: nn.Module
    gates: bool
    grads: bool
    notes: list[Any] = field(default_factory=list)  # what the kernels inside did
    taps: dict[str, Tensor] = field(default_factory=dict)  # what the cell named with hs.tap


class _Here(threading.local):
    def __init__(self) -> None:
        self.frames: list[Frame] = []  # innermost last


_here = _Here()


def innermost() -> list[Frame]:
    """Return the frames of the innermost call: one for each recording that hears it."""
    frames = _here.frames
    return [frame for frame in frames if frame.module is frames[-1].module] if frames else []


def run_in(frame: Frame, run: Callable[[], Any], intercept: Intercept | None = None) -> Any:
    """Return what `run()` does while `frame` is open; where a kernel is called, `intercept` steps in.

    Where several recordings hear one call, that of the outermost does so for all: it finds their frames by `innermost`.
    """
    frames = _here.frames
    alone = not frames or frames[-1].module is not frame.module
    frames.append(frame)
    try:
        if intercept is None or not alone:
            return run()
        with intercept:
            return run()
    finally:
        frames.pop()
