"""Pooling heads: they turn the states at every step of a sequence into one result. Padding never counts."""

from .attention import Attention, MultiHead
from .compare_heads import HeadScores, compare_heads
from .concat import Concat
from .last import Last
from .mean import Mean
from .peaks import LogSumExp, Max
from .pool import Pool
from .steps import Steps
from .taps import Taps

__all__ = [
    "Attention",
    "Concat",
    "HeadScores",
    "Last",
    "LogSumExp",
    "Max",
    "Mean",
    "MultiHead",
    "Pool",
    "Steps",
    "Taps",
    "compare_heads",
]
