"""How a cell is run along time, and run fast."""

from .explain import explain
from .observing import Places, places
from .recurrent import Recurrent
from .unroll import unroll

__all__ = ["Places", "Recurrent", "explain", "places", "unroll"]
