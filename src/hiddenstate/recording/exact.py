"""Another way to the same bits, taken only after it has been seen to give them."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import TypeVar

from torch import Tensor

_T = TypeVar("_T")
_verdicts: dict[Hashable, bool] = {}


def same_bits(ours: tuple[Tensor, ...], plain: tuple[Tensor, ...]) -> bool:
    """Say whether two results are equal, NaN being equal to NaN."""
    return all(
        a.shape == b.shape and a.dtype == b.dtype and bool(((a == b) | ((a != a) & (b != b))).all())
        for a, b in zip(ours, plain, strict=True)
    )


def trusted(key: Hashable) -> bool | None:
    """Return whether the way of this key has been seen to agree, or None where it has not been tried."""
    return _verdicts.get(key)


def judge(key: Hashable, agree: Callable[[], bool]) -> bool:
    """Return the verdict on a way, which is found by `agree()` the first time and remembered."""
    verdict = _verdicts.get(key)
    if verdict is None:
        verdict = _verdicts[key] = agree()
    return verdict
