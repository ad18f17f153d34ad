"""Seeing a run without changing it: every state and gate, at near the cost of a plain forward."""

# Who is watched: for the parts above that may know recordings but not cells.
from ..cells import Handle, Hook, Layer, as_layer, layers
from .opening import load_recording, record
from .recording import Recording
from .taps import tap
from .trajectory import Trajectory

__all__ = [
    "Handle",
    "Hook",
    "Layer",
    "Recording",
    "Trajectory",
    "as_layer",
    "layers",
    "load_recording",
    "record",
    "tap",
]
