"""What a hidden state is: named tensors at one instant."""

from .each import Format
from .files import from_bytes, load, to_bytes
from .rows import Rows
from .value import State

__all__ = ["Format", "Rows", "State", "from_bytes", "load", "to_bytes"]
