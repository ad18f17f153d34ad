"""How a state goes from batch to batch: carried, reset, learned, bridged, or truncated."""

from .bridge import Bridge
from .carry import Carry
from .check_split import Split, check_split
from .initial import Learned, Noise
from .streams import Chunk, Streams
from .tbptt import tbptt

__all__ = [
    "Bridge",
    "Carry",
    "Chunk",
    "Learned",
    "Noise",
    "Split",
    "Streams",
    "check_split",
    "tbptt",
]
