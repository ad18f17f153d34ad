"""What a model returned, and the step of it that is meant."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..errors import BadInput
from .series import first_bad


def tensor_of(output: Any) -> Tensor:
    """Return the tensor in what a model returned: itself, the first of a tuple, or the usual entry of a mapping."""
    if isinstance(output, Tensor):
        return output
    if isinstance(output, tuple | list) and output:
        return tensor_of(output[0])
    for name in ("logits", "last_hidden_state", "output"):
        found = output.get(name) if isinstance(output, dict) else getattr(output, name, None)
        if isinstance(found, Tensor):
            return found
    raise BadInput(
        f"the model returned {type(output).__name__}, in which no output tensor was recognized: "
        f"give output=, a function that takes what the model returns and gives a tensor."
    )


def at_steps(output: Tensor, ends: Tensor, valid: Tensor, *, time_axis: int) -> Tensor:
    """Return the output at each row's step `ends (batch,)`, or the one output a row has: (batch, unit)."""
    _refuse_numberless(output)
    batch, time = valid.shape
    if time_axis == 0 and output.shape[:2] == (time, batch):
        output = output.transpose(0, 1)
    if output.shape[:2] == (batch, time):
        _refuse_bad(output.reshape(batch, time, -1), valid)
        output = output[torch.arange(batch, device=output.device), ends.to(output.device)]
    elif output.dim() not in (1, 2) or len(output) != batch:
        raise BadInput(
            f"the output has shape {tuple(output.shape)}, but the input has {batch} rows of {time} steps: neither "
            f"(batch, time, unit) nor (batch, unit). For a time-first model give time_axis=0, for others output=."
        )
    else:
        _refuse_bad(output.reshape(batch, 1, -1), valid.any(1, keepdim=True))
    output = torch.view_as_real(output) if output.is_complex() else output
    return output.reshape(batch, -1)


def _refuse_numberless(output: Tensor) -> None:
    if not isinstance(output, Tensor):
        raise BadInput(f"output= returned {type(output).__name__}, but a tensor is needed.")
    if not output.is_floating_point() and not output.is_complex():
        raise BadInput(
            f"the output is {output.dtype}, which has no gradient. Often an argmax ends the model: "
            f"measure its scores instead, with output=."
        )


def _refuse_bad(output: Tensor, valid: Tensor) -> None:
    where = first_bad(output.detach(), valid.to(output.device))
    if where is None:
        return
    row, step, _ = where
    place = f"row {row} from step {step} on" if output.shape[1] > 1 else f"row {row}"
    raise BadInput(
        f"the output of {place} is not finite, so it has no gradient that means anything. "
        f"Look for NaN or Inf in the input and the weights; hs.measure.statistics finds the first in a trajectory."
    )
