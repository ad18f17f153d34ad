"""How a cell is run along time, and run fast."""

from .explain import explain
from .observing import row_order, unseen
from .recurrent import Recurrent
from .unroll import unroll

__all__ = ["Recurrent", "explain", "row_order", "unroll", "unseen"]
