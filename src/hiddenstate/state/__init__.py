"""What a hidden state is: named tensors at one instant."""

from .each import Format
from .files import from_bytes, load, to_bytes
from .rows import Rows, row_index
from .value import State

__all__ = ["Format", "Rows", "State", "from_bytes", "load", "row_index", "to_bytes"]
