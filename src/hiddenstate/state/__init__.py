"""What a hidden state is: named tensors at one instant."""

from .each import Format
from .files import from_bytes, load, to_bytes
from .nested import Path, ends, mapped, numbers, spelled, tensors
from .rows import Rows, row_index
from .value import State

__all__ = [
    "Format",
    "Path",
    "Rows",
    "State",
    "ends",
    "from_bytes",
    "load",
    "mapped",
    "numbers",
    "row_index",
    "spelled",
    "tensors",
    "to_bytes",
]
