"""Seeing a run without changing it: every state and gate, at near the cost of a plain forward."""

from .opening import load_recording, record
from .recording import Recording
from .taps import tap
from .trajectory import Trajectory

__all__ = [
    "Recording",
    "Trajectory",
    "load_recording",
    "record",
    "tap",
]
