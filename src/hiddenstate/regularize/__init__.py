"""Regularization of states: penalties on their size and changes, and dropout made for recurrence."""

from .dropout import VariationalDropout
from .penalty import Penalty
from .terms import activity, norm_stabilizer, temporal
from .weight_drop import WeightDrop
from .zoneout import Zoneout

__all__ = [
    "Penalty",
    "VariationalDropout",
    "WeightDrop",
    "Zoneout",
    "activity",
    "norm_stabilizer",
    "temporal",
]
