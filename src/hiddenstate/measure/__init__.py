"""Numbers: what states do, how long they remember, and which way their dynamics lead."""

from .dead_units import DeadUnits, dead_units
from .dimension import Dimension, dimension
from .memory import Memory, memory
from .saturation import Saturation, saturation
from .statistics import Statistics, statistics

__all__ = [
    "DeadUnits",
    "Dimension",
    "Memory",
    "Saturation",
    "Statistics",
    "dead_units",
    "dimension",
    "memory",
    "saturation",
    "statistics",
]
