"""Loops over time that are written in Python, run by the engine where they stand."""

from .model import RolledLoops

__all__ = ["RolledLoops"]
