"""What a trace cannot hold: a cell that remembers things, or draws numbers outside torch."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
from torch import Tensor, nn

from ..cells import attributes
from ..errors import Untraceable


class Watch:
    """Notices what a trace cannot hold: a cell that remembers things, or draws numbers outside torch."""

    def __init__(self, module: nn.Module) -> None:
        """Remember how the module is now."""
        self.module = module
        self.before = self._look()
        self.random = random.getstate(), np.random.get_state(legacy=False)

    def put_back_random(self) -> bool:
        """Put back the streams of Python and numpy, and say whether anything was drawn from them."""
        now = random.getstate(), np.random.get_state(legacy=False)
        drawn = self.random[0] != now[0] or repr(self.random[1]) != repr(now[1])
        random.setstate(self.random[0])
        np.random.set_state(self.random[1])
        return drawn

    def check(self, drawn: bool) -> None:
        """Refuse a module that is not as it was before."""
        for (name, old), (_, new) in zip(self.before, self._look(), strict=True):
            changed = [key for key in {*old, *new} if old.get(key) != new.get(key)]
            if changed:
                place = f"{name}.{changed[0]}" if name else changed[0]
                raise Untraceable(f"it changes its own attribute {place!r} at every step")
        if drawn:
            raise Untraceable("it draws random numbers from Python or numpy, which a trace would freeze")

    def _look(self) -> list[tuple[str, dict[str, Any]]]:
        return [(name, _visible(member)) for name, member in self.module.named_modules()]


def _visible(member: nn.Module) -> dict[str, Any]:
    seen: dict[str, Any] = {}
    for store in (attributes(member), member._buffers, member._parameters):
        for key, value in store.items():
            if key in ("_buffers", "_parameters", "_modules"):
                continue
            version = value._version if isinstance(value, Tensor) and not value.is_inference() else None
            size = len(value) if isinstance(value, list | dict | set) else None
            seen[key] = (id(value), version, size)
    return seen
