"""Stores of sessions: in memory, in a SQLite file, or in a Redis that several workers share."""

from .address import open_store
from .memory import MemoryStore
from .store import Advance, Blobs, Busy, Change, Claim, Floats, Ints, Lookup, Row, Store

__all__ = [
    "Advance",
    "Blobs",
    "Busy",
    "Change",
    "Claim",
    "Floats",
    "Ints",
    "Lookup",
    "MemoryStore",
    "Row",
    "Store",
    "open_store",
]
