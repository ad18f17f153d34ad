"""Numbers by name, asked for by the hundred."""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np

Ints: TypeAlias = "np.ndarray[Any, np.dtype[np.int64]]"
Floats: TypeAlias = "np.ndarray[Any, np.dtype[np.float64]]"
MISSING = -1


class Lookup:
    """Where each name is. Names that were asked for together are often asked for together again.

    >>> where = Lookup()
    >>> where.add("a", 3)
    >>> where.all(["a", "b"]).tolist()
    [3, -1]
    """

    __slots__ = ("_asked", "_found", "names")

    def __init__(self) -> None:
        """Know none."""
        self.names: dict[str, int] = {}  # to be looked at, not to be changed
        self._asked: list[str] | None = None
        self._found: Ints = np.zeros(0, np.int64)

    def add(self, name: str, number: int) -> None:
        """Note where a name is."""
        self._asked = None
        self.names[name] = number

    def remove(self, name: str) -> int | None:
        """Forget a name, and return where it was."""
        self._asked = None
        return self.names.pop(name, None)

    def all(self, names: list[str]) -> Ints:
        """Return the number of each, -1 where there is none; not to be changed."""
        if names != self._asked:  # of the same strings this takes next to no time
            known = self.names
            self._found = np.array([known.get(name, MISSING) for name in names], np.int64)
            self._asked = list(names)
        return self._found
