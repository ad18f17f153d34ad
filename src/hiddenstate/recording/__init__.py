"""Recording the states and gates of a run without changing it, at little more than the cost of a plain forward."""

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
