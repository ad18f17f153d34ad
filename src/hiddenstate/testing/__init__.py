"""Checks of what the library relies on, for your own models, cells, adapters, stores and rules; and test doubles."""

from ..serve.stores import MemoryStore
from .assert_healthy import assert_healthy
from .check_adapter import check_adapter
from .check_cell import check_cell
from .check_equations import check_equations
from .check_rule import check_rule
from .check_store import check_store
from .fake_clock import FakeClock

__all__ = [
    "FakeClock",
    "MemoryStore",
    "assert_healthy",
    "check_adapter",
    "check_cell",
    "check_equations",
    "check_rule",
    "check_store",
]
