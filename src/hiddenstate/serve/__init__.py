"""One state for each caller: many sessions, batched into one model call per tick, and durable."""

from .client import Client
from .engine import Engine
from .server import Tls, app, run
from .session import Session

__all__ = ["Client", "Engine", "Session", "Tls", "app", "run"]
