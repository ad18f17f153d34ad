"""How a cell is run along time, and run fast."""

from .observing import row_order, unseen
from .recurrent import Recurrent
from .unroll import unroll

__all__ = ["Recurrent", "row_order", "unroll", "unseen"]
