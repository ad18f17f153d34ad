"""Where sessions are kept: in memory, in a SQLite file, or in a Redis that several workers share."""

from .memory import MemoryStore
from .opening import open_store
from .store import Advance, Busy, Change, Claim, Row, Store

__all__ = ["Advance", "Busy", "Change", "Claim", "MemoryStore", "Row", "Store", "open_store"]
