"""Pictures: each function draws one thing into one `ax`, and computes, shows and saves nothing."""

from .attention import attention
from .distances import distances
from .fixed_points import fixed_points
from .gates import gates
from .heatmap import heatmap, ordered
from .memory import memory
from .projection import Projection, project
from .saturation import saturation
from .series import one_row, readable
from .spectrum import spectrum
from .thinning import Thinned, averaged, picked
from .trajectories import trajectories

__all__ = [
    "Projection",
    "Thinned",
    "attention",
    "averaged",
    "distances",
    "fixed_points",
    "gates",
    "heatmap",
    "memory",
    "one_row",
    "ordered",
    "picked",
    "project",
    "readable",
    "saturation",
    "spectrum",
    "trajectories",
]
