"""Running a cell along time, fast."""

from .accelerate import Accelerated, accelerate
from .explain import explain
from .observing import RowPlaces, places
from .recurrent import Recurrent
from .unroll import unroll

__all__ = ["Accelerated", "Recurrent", "RowPlaces", "accelerate", "explain", "places", "unroll"]
