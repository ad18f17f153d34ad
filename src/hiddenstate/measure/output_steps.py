"""Finding the time axis of a model's output: the one that gets shorter with the input."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..errors import BadInput


def steps_second(output: Tensor, valid: Tensor, *, time_axis: int, again: Callable[[int], Any]) -> tuple[Tensor, bool]:
    """Return an output with one step for each step of the input as (batch, time, ...), and whether it has such steps.

    Sizes alone do not tell: ten classes look like ten steps. So `again(steps)` must return the output for fewer steps
    of input. If the model takes no fewer, an axis as long as the input counts as time. If all rows and steps are on one
    axis, as for a loss, the output for fewer steps shows their order.
    """
    batch, time = valid.shape
    if not isinstance(output, Tensor) or time < 2 or (output.dim() < 2 and output.numel() != batch * time):
        return output, False
    shorter = _of_fewer(again, time)
    if shorter is None or shorter.dim() != output.dim():
        axis = _by_size(output, batch, time, time_axis=time_axis)
    else:
        changed = [axis for axis, size in enumerate(output.shape) if size != shorter.shape[axis]]
        if not changed:
            return (output.unsqueeze(1) if len(output) == batch else output), False
        axis = changed[0] if len(changed) == 1 and output.shape[changed[0]] == time and output.dim() > 1 else None
        if axis is None and output.shape[changed[0]] != batch * time:
            raise BadInput(_of_other_length(tuple(output.shape), changed[0], time))
        if axis is None and changed == [0] and (parted := _parted(output, shorter, batch, time)) is not None:
            return parted, True
    if axis is None:
        return output, False
    rows = 1 if axis == 0 else 0
    if output.shape[rows] != batch:
        return output, False
    return output.movedim((rows, axis), (0, 1)), True


def _parted(output: Tensor, shorter: Tensor, batch: int, time: int) -> Tensor | None:
    """Return an output with all rows and steps on axis 0 as (batch, time, ...); None if their order is unknown.

    The order shows in the output for the first steps alone, if these do not depend on later ones.
    """
    rest = output.shape[1:]
    orders = (output.reshape(time, batch, *rest).transpose(0, 1), output.reshape(batch, time, *rest))
    steps = len(shorter) // batch
    tries = (shorter.reshape(steps, batch, *rest).transpose(0, 1), shorter.reshape(batch, steps, *rest))
    fits = [
        order
        for order, tried in zip(orders, tries, strict=True)
        if torch.allclose(order[:, :steps].detach(), tried, rtol=1e-4, atol=1e-5)
    ]
    return fits[0] if len(fits) == 1 or batch == 1 else None


def _of_fewer(again: Callable[[int], Any], time: int) -> Tensor | None:
    """Return the output for half of the steps, or for one step less; None if the model accepts neither."""
    for steps in dict.fromkeys((time // 2, time - 1)):
        try:
            with torch.no_grad():
                found = again(steps)
            return found if isinstance(found, Tensor) else None
        except Exception:  # a trial call: the model may only take certain numbers of steps
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
