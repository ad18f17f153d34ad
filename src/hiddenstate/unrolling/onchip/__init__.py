"""Running a whole loop in one CUDA kernel, which keeps the weights on the chip from the first step to the last."""

from .runner import OnChipRunner

__all__ = ["OnChipRunner"]
