"""A whole loop as one kernel, whose weights stay on the chip from the first step to the last."""

from .runner import OnChipRunner

__all__ = ["OnChipRunner"]
