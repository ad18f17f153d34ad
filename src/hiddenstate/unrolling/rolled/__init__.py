"""Running loops over time that are written in Python by the engine."""

from .model import RolledLoops

__all__ = ["RolledLoops"]
