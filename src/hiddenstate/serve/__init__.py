"""One state for each caller: many sessions, batched into one model call per tick, and durable."""

from .engine import Engine
from .session import Session

__all__ = ["Engine", "Session"]
