"""How a cell is run along time, and run fast."""

from .accelerate import Accelerated, accelerate
from .explain import explain
from .observing import RowPlaces, places
from .recurrent import Recurrent
from .unroll import unroll

__all__ = ["Accelerated", "Recurrent", "RowPlaces", "accelerate", "explain", "places", "unroll"]
