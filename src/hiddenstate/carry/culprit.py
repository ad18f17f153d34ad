"""Which line of a model gives something else for pieces of an input than for the whole."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor
from torch.overrides import TorchFunctionMode

from ..state import tensors
from .ways import line_of, users_frame


class MadeAtPlaces(TorchFunctionMode):
    """Keeps what is made at each place of the code, in order."""

    def __init__(self) -> None:
        """Begin with nothing."""
        super().__init__()
        self.made: dict[Any, list[Tensor]] = {}

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run one operation."""
        result = func(*args, **(kwargs or {}))
        frame = users_frame(sys._getframe(1))
        for path, tensor in tensors(result).items():
            if tensor.dim():  # numbers are told by the tensors that are made of them
                self.made.setdefault((func, frame.f_code, frame.f_lasti, path), []).append(tensor.detach().clone())
        return result


def made_by(run: Callable[[], Any]) -> dict[Any, list[Tensor]]:
    """Return what a call makes at each place of the code."""
    noted = MadeAtPlaces()
    with noted:
        run()
    return noted.made


def first_difference(
    whole: Mapping[Any, list[Tensor]],
    pieces: tuple[Mapping[Any, list[Tensor]], Mapping[Any, list[Tensor]]],
    apart: Callable[[Tensor, Tensor, Tensor], bool],
) -> str:
    """Return the line of the first place at which two pieces make something else than the whole; empty: there is none.

    A place that every step passes makes as many things for both pieces together; any other one is passed in each call.
    `apart` says whether the whole differs from what two pieces give.
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
