"""Finding the line of a model whose result differs between pieces of an input and the whole."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor
from torch.overrides import TorchFunctionMode

from ..state import tensors
from .ways import line_of, users_frame


class MadeAtPlaces(TorchFunctionMode):
    """Keeps the tensors made at each place of the code, in order."""

    def __init__(self) -> None:
        """Start with none."""
        super().__init__()
        self.made: dict[Any, list[Tensor]] = {}

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run one operation and keep its result."""
        result = func(*args, **(kwargs or {}))
        frame = users_frame(sys._getframe(1))
        for path, tensor in tensors(result).items():
            if tensor.dim():  # a difference in a number shows in the tensors made from it
                self.made.setdefault((func, frame.f_code, frame.f_lasti, path), []).append(tensor.detach().clone())
        return result


def made_by(run: Callable[[], Any]) -> dict[Any, list[Tensor]]:
    """Return the tensors that a call makes at each place of the code."""
    noted = MadeAtPlaces()
    with noted:
        run()
    return noted.made


def first_difference(
    whole: Mapping[Any, list[Tensor]],
    pieces: tuple[Mapping[Any, list[Tensor]], Mapping[Any, list[Tensor]]],
    apart: Callable[[Tensor, Tensor, Tensor], bool],
) -> str:
    """Return the first line that makes something else for two pieces than for the whole; "" if there is none.

    A place that every step passes makes as many tensors in both pieces together as in the whole; any other place makes
    its tensors once per call. `apart` says whether the whole differs from two pieces.
    """
    for place, made in whole.items():
        first, second = (piece.get(place, []) for piece in pieces)
        if len(made) == len(first) + len(second):
            differs = any(apart(one, other, other) for one, other in zip(made, (*first, *second), strict=True))
        elif len(made) == len(first) == len(second):
            differs = any(apart(*three) for three in zip(made, first, second, strict=True))
        else:
            continue
        if differs:
            return line_of(place[1], place[2])
    return ""
