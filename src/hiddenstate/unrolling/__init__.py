"""How a cell is run along time, and run fast."""

from .accelerate import Accelerated, accelerate
from .explain import explain
from .observing import Places, places
from .recurrent import Recurrent
from .unroll import unroll

__all__ = ["Accelerated", "Places", "Recurrent", "accelerate", "explain", "places", "unroll"]
