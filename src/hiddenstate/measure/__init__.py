"""Numbers: what states do, how long they remember, and which way their dynamics lead."""

from .dead_units import DeadUnits, dead_units
from .dimension import Dimension, dimension
from .fixed_points import FixedPoints, fixed_points
from .jacobians import Jacobians, jacobians
from .lyapunov import Lyapunov, lyapunov
from .memory import Memory, memory
from .saturation import Saturation, saturation
from .statistics import Statistics, statistics

__all__ = [
    "DeadUnits",
    "Dimension",
    "FixedPoints",
    "Jacobians",
    "Lyapunov",
    "Memory",
    "Saturation",
    "Statistics",
    "dead_units",
    "dimension",
    "fixed_points",
    "jacobians",
    "lyapunov",
    "memory",
    "saturation",
    "statistics",
]
