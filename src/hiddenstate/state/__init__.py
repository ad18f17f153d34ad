"""What a hidden state is: named tensors at one instant."""

from .checks import check_shapes
from .display import as_preformatted, as_table, shown_in_short
from .files import to_bytes
from .format import Format
from .nested import Path, detached, ends, mapped, numbers, spelled, tensors
from .rows import Rows, row_index
from .value import State, from_bytes, load

__all__ = [
    "Format",
    "Path",
    "Rows",
    "State",
    "as_preformatted",
    "as_table",
    "check_shapes",
    "detached",
    "ends",
    "from_bytes",
    "load",
    "mapped",
    "numbers",
    "row_index",
    "shown_in_short",
    "spelled",
    "tensors",
    "to_bytes",
]
