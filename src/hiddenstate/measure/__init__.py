"""Numbers: what states do, how long they remember, and which way their dynamics lead."""

from .compare import Comparison, compare
from .dead_units import DeadUnits, dead_units
from .dimension import Dimension, dimension
from .fixed_points import FixedPoints, fixed_points
from .jacobians import Jacobians, jacobians
from .lyapunov import Lyapunov, lyapunov
from .memory import Memory, memory
from .memory_capacity import MemoryCapacity, memory_capacity
from .positions import Positions, positions
from .probe import Probe, probe
from .saturation import Saturation, saturation
from .statistics import Statistics, statistics

__all__ = [
    "Comparison",
    "DeadUnits",
    "Dimension",
    "FixedPoints",
    "Jacobians",
    "Lyapunov",
    "Memory",
    "MemoryCapacity",
    "Positions",
    "Probe",
    "Saturation",
    "Statistics",
    "compare",
    "dead_units",
    "dimension",
    "fixed_points",
    "jacobians",
    "lyapunov",
    "memory",
    "memory_capacity",
    "positions",
    "probe",
    "saturation",
    "statistics",
]
