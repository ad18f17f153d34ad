"""When two tensors count as the same."""

from torch import Tensor


def same(a: Tensor, b: Tensor) -> bool:
    """Say whether two tensors hold the same values, NaN being equal to NaN."""
    return a.shape == b.shape and bool(((a == b) | ((a != a) & (b != b))).all())
