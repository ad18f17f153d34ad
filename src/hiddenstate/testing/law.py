"""Trying laws one after the other; the first broken one raises, with what was seen."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeAlias, TypeVar

import torch
from torch import Tensor

from ..errors import LawBroken

Subject = TypeVar("Subject")

# For each law, its sentence and a function that tries it; if the law is broken, the function returns what it saw.
Laws: TypeAlias = Mapping[str, Callable[[Subject], str | None]]

_TOLERANCE = {torch.float64: 1e-9, torch.complex128: 1e-9, torch.float16: 1e-2, torch.bfloat16: 5e-2}


def enforce(laws: Laws[Subject], subject: Subject, name: str) -> None:
    """Raise `LawBroken` for the first law that `subject`, called `name`, breaks."""
    for law, tried in laws.items():
        try:
            seen = tried(subject)
        except Exception as error:  # name the law that was tried, whatever error the user's code raises
            raise LawBroken(f"{name} breaks a law: {law}. {type(error).__name__}: {error}") from error
        if seen is not None:
            raise LawBroken(f"{name} breaks a law: {law}. {seen}")


def difference(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> str | None:
    """Describe how two sets of named tensors differ beyond rounding; None if they do not."""
    if list(one) != list(other):
        return f"Here are {', '.join(one)}, there {', '.join(other)}."
    for name, left in one.items():
        right = other[name]
        if (left.shape, left.dtype) != (right.shape, right.dtype):
            return f"{name} is {tuple(left.shape)} {left.dtype} here, and {tuple(right.shape)} {right.dtype} there."
        tolerance = _TOLERANCE.get(left.dtype, 1e-4)
        if not torch.allclose(left, right, rtol=tolerance, atol=tolerance, equal_nan=True):
            gap = float((left.to(torch.complex128) - right.to(torch.complex128)).abs().max())
            return f"{name} differs by up to {gap:.3g}, where rounding explains {tolerance:g}."
    return None
