"""Pictures: each function draws one picture into one `ax`. It does not compute, show or save anything."""

from .attention import attention
from .compare import compare
from .contributions import contributions
from .distances import distances
from .fixed_points import fixed_points
from .gates import gates
from .heatmap import heatmap, ordered
from .histogram import histogram
from .memory import memory
from .novelty import novelty
from .picture_data import Thinned, averaged, jumps, one_row, picked, readable
from .probe import probe
from .projection import Projection, project
from .saturation import saturation
from .spectrum import spectrum
from .trajectories import trajectories

__all__ = [
    "Projection",
    "Thinned",
    "attention",
    "averaged",
    "compare",
    "contributions",
    "distances",
    "fixed_points",
    "gates",
    "heatmap",
    "histogram",
    "jumps",
    "memory",
    "novelty",
    "one_row",
    "ordered",
    "picked",
    "probe",
    "project",
    "readable",
    "saturation",
    "spectrum",
    "trajectories",
]
