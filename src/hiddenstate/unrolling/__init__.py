"""How a cell is run along time, and run fast."""

from .recurrent import Recurrent
from .unroll import unroll

__all__ = ["Recurrent", "unroll"]
