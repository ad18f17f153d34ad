"""Recording every state and gate of a run without changing it, at a small part of the cost of a loop."""

from .api import load_recording, record
from .frames import tap
from .layout import refuse_time_first
from .recording import Recording, the_track
from .trajectory import Trajectory, trainable

__all__ = [
    "Recording",
    "Trajectory",
    "load_recording",
    "record",
    "refuse_time_first",
    "tap",
    "the_track",
    "trainable",
]
