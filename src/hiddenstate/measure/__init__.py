"""Measures: numbers about what states do, how long they remember, and where their dynamics lead.

    saturation, dead_units, statistics, dimension     of states
    compare, probe, novelty, automaton, attention     of what states mean
    memory, memory_capacity, positions, contributions of what a model or layer remembers
    jacobians, lyapunov, fixed_points                 of a layer as a dynamical system
    runs_of, survey                                   states of a data set, batch by batch, and all of them in one pass
    tracked                                           a bar beside work that takes long

Each function returns a frozen dataclass that prints as a sentence. Each is loaded when it is first used.
"""

import sys
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .attention import AttentionWeights, attention
    from .automaton import Automaton, automaton
    from .compare import Comparison, compare
    from .contributions import Contributions, contributions
    from .dead_units import DeadUnits, dead_units
    from .dimension import Dimension, dimension
    from .fixed_points import FixedPoints, fixed_points
    from .jacobians import Jacobians, jacobians
    from .lyapunov import Lyapunov, lyapunov
    from .memory import Memory, memory
    from .memory_capacity import MemoryCapacity, memory_capacity
    from .novelty import Novelty, novelty
    from .positions import Positions, positions
    from .probe import Probe, probe
    from .progress import tracked
    from .runs_of import runs_of
    from .saturation import Saturation, saturation
    from .statistics import Statistics, statistics
    from .survey import Survey, survey

__all__ = [
    "AttentionWeights",
    "Automaton",
    "Comparison",
    "Contributions",
    "DeadUnits",
    "Dimension",
    "FixedPoints",
    "Jacobians",
    "Lyapunov",
    "Memory",
    "MemoryCapacity",
    "Novelty",
    "Positions",
    "Probe",
    "Saturation",
    "Statistics",
    "Survey",
    "attention",
    "automaton",
    "compare",
    "contributions",
    "dead_units",
    "dimension",
    "fixed_points",
    "jacobians",
    "lyapunov",
    "memory",
    "memory_capacity",
    "novelty",
    "positions",
    "probe",
    "runs_of",
    "saturation",
    "statistics",
    "survey",
    "tracked",
]

# Each function is in the file with its name, and its result class beside it.
_HOMES = {
    "AttentionWeights": "attention",
    "Automaton": "automaton",
    "Comparison": "compare",
    "Contributions": "contributions",
    "DeadUnits": "dead_units",
    "Dimension": "dimension",
    "FixedPoints": "fixed_points",
    "Jacobians": "jacobians",
    "Lyapunov": "lyapunov",
    "Memory": "memory",
    "MemoryCapacity": "memory_capacity",
    "Novelty": "novelty",
    "Positions": "positions",
    "Probe": "probe",
    "Saturation": "saturation",
    "Statistics": "statistics",
    "Survey": "survey",
    "tracked": "progress",
}


class _Measure(ModuleType):
    """This module, in which a measure's name means the function, even after its file was imported."""

    def __setattr__(self, name: str, value: object) -> None:
        # When Python imports a submodule, it sets it as an attribute of the package, under the name of the function.
        if isinstance(value, ModuleType) and name in __all__:
            value = getattr(value, name)
        super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Measure

if not TYPE_CHECKING:  # with __getattr__ visible, a type checker would accept any name

    def __getattr__(name: str) -> object:
        """Load a measure when it is first used, so that importing the library stays quick."""
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from importlib import import_module

        value = getattr(import_module(f".{_HOMES.get(name, name)}", __name__), name)
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return __all__
