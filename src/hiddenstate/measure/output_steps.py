"""Which axis of a model's output is time: the one that gets shorter with the input."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..errors import BadInput


def steps_second(output: Tensor, valid: Tensor, *, time_axis: int, again: Callable[[int], Any]) -> tuple[Tensor, bool]:
    """Return an output that has a step for each of the input's as (batch, time, ...), and whether it has.

    Sizes alone do not tell: ten classes look like ten steps. So `again(steps)` gives the output for fewer steps of the
    input. Where the model takes no fewer, an axis as long as the input counts as time.
    """
    batch, time = valid.shape
    if not isinstance(output, Tensor) or output.dim() < 2 or time < 2:
        return output, False
    shorter = _shape_of_fewer(again, time)
    if shorter is None or len(shorter) != output.dim():
        axis = _by_size(output, batch, time, time_axis=time_axis)
    else:
        changed = [axis for axis, size in enumerate(output.shape) if size != shorter[axis]]
        if not changed:
            return (output.unsqueeze(1) if len(output) == batch else output), False
        axis = changed[0] if len(changed) == 1 and output.shape[changed[0]] == time else None
        if axis is None and output.shape[changed[0]] != batch * time:
            raise BadInput(_of_other_length(tuple(output.shape), changed[0], time))
    if axis is None:
        return output, False
    rows = 1 if axis == 0 else 0
    if output.shape[rows] != batch:
        return output, False
    return output.movedim((rows, axis), (0, 1)), True


def _shape_of_fewer(again: Callable[[int], Any], time: int) -> tuple[int, ...] | None:
    """Return the shape of the output for half of the steps, or for one less; None where the model takes neither."""
    for steps in dict.fromkeys((time // 2, time - 1)):
        try:
            with torch.no_grad():
                return tuple(again(steps).shape)
        except Exception:  # a trial: a model may take so many steps and no others
            continue
    return None


def _by_size(output: Tensor, batch: int, time: int, *, time_axis: int) -> int | None:
    usual = (batch, time) if time_axis == 1 else (time, batch)
    if tuple(output.shape[:2]) == usual:
        return time_axis
    fitting = [axis for axis, size in enumerate(output.shape) if size == time and output.shape[int(axis == 0)] == batch]
    if len(fitting) > 1:
        axes = " and ".join(map(str, fitting))
        raise BadInput(
            f"the output has shape {tuple(output.shape)}, in which axes {axes} are as long as the input, {time} steps; "
            f"the model takes no other number of steps, which would tell them apart. Say which is time: "
            f"output=lambda out: out.movedim({fitting[-1]}, 1), or the like."
        )
    return fitting[0] if fitting else None


def _of_other_length(shape: tuple[int, ...], axis: int, time: int) -> str:
    place = ":, " * axis + "-1"
    return (
        f"the output has shape {shape}, and {shape[axis]} entries along axis {axis} for {time} steps of input: more "
        f"or fewer with the input, but not one for each step, so which of them is the last is not told. Say it: "
        f"output=lambda out: out[{place}]."
    )
