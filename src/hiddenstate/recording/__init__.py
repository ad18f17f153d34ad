"""Seeing a run without changing it: every state and gate, at a small part of the cost of a loop."""

from .api import load_recording, record
from .frames import tap
from .recording import Recording, the_track
from .trajectory import Trajectory, trainable

__all__ = [
    "Recording",
    "Trajectory",
    "load_recording",
    "record",
    "tap",
    "the_track",
    "trainable",
]
