"""Recurrence found by what a model does: the state of a computation is what crosses between repetitions."""

from .finding import find, find_in
from .found import Found, Part, Recurrence, Unsure

__all__ = ["Found", "Part", "Recurrence", "Unsure", "find", "find_in"]
