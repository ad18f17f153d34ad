"""Seeing a run without changing it: every state and gate, at near the cost of a plain forward."""

from .trajectory import Trajectory

__all__ = ["Trajectory"]
