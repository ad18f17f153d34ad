"""How a state goes from batch to batch: carried, reset, learned, bridged, truncated."""

from .bridge import Bridge
from .carrying import Carry
from .hooks import after, before
from .initial import Learned, Noise
from .splitting import Split, check_split
from .streams import Chunk, Streams
from .truncating import tbptt

__all__ = [
    "Bridge",
    "Carry",
    "Chunk",
    "Learned",
    "Noise",
    "Split",
    "Streams",
    "after",
    "before",
    "check_split",
    "tbptt",
]
