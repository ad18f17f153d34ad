"""What every penalty sees: states along time, and which of them count."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TypeAlias

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence, pad_packed_sequence

from ..errors import BadInput
from ..recording import Trajectory

Source: TypeAlias = "Tensor | Trajectory | PackedSequence"
Lengths: TypeAlias = "Tensor | Sequence[int]"


def read_states(h: Source, lengths: Lengths | None) -> tuple[Tensor, Tensor | None]:
    """Return states (batch, time, unit), zero in the padding, and which steps count, bool (batch, time) or None.

    The zeros are chosen, not multiplied: neither NaN in the padding nor gradient into it comes through.
    """
    if not isinstance(h, Tensor):
        h, lengths = _unwrapped(h, lengths)
    if h.dim() != 3 or not h.is_floating_point():
        raise BadInput(
            f"states are floating point numbers (batch, time, unit), but these are {h.dtype} of shape "
            f"{tuple(h.shape)}. One sequence without a batch axis becomes one with h.unsqueeze(0)."
        )
    h = h.to(torch.promote_types(h.dtype, torch.float32))  # the square of a half is soon too large for one
    if lengths is None:
        return h, None
    lengths = _read_lengths(lengths, h)
    valid = torch.arange(h.shape[1], device=h.device) < lengths.unsqueeze(1)
    return torch.where(valid.unsqueeze(-1), h, 0.0), valid


def mean_over(values: Tensor, valid: Tensor | None, *, what: str) -> Tensor:
    """Return the mean of `values (batch, time, ...)`, zero where they do not count, over those that do."""
    if valid is None:
        _refuse_empty(values.numel(), what)
        return values.mean()
    count = valid.sum() * math.prod(values.shape[2:])
    if not torch.compiler.is_compiling():
        _refuse_empty(int(count), what)
    return values.sum() / count


def _unwrapped(h: Trajectory | PackedSequence, lengths: Lengths | None) -> tuple[Tensor, Tensor]:
    if lengths is not None:
        raise BadInput(f"lengths were given with a {type(h).__name__}, which knows its own. Leave them out.")
    if isinstance(h, PackedSequence):
        padded, own = pad_packed_sequence(h, batch_first=True)
        return padded, own.to(padded.device)
    if isinstance(h, Trajectory):
        assert h.lengths is not None
        return h.h, h.lengths.to(h.h.device)
    raise BadInput(
        f"a tensor (batch, time, unit), a Trajectory or a PackedSequence is needed, but this is {type(h).__name__}. "
        f"A recurrent layer returns (output, state): give its output."
    )


def _read_lengths(lengths: Lengths, h: Tensor) -> Tensor:
    if not isinstance(lengths, Tensor):
        lengths = torch.as_tensor(lengths, device=h.device)
    batch, time = h.shape[:2]
    if lengths.dtype == torch.bool or lengths.is_floating_point():
        raise BadInput(f"lengths are {lengths.dtype}, but whole numbers are needed. Those of a mask are mask.sum(1).")
    if lengths.shape != (batch,):
        raise BadInput(f"lengths have shape {tuple(lengths.shape)}, but the states have {batch} rows: one for each.")
    if lengths.device != h.device:
        raise BadInput(f"lengths are on {lengths.device}, but the states are on {h.device}: lengths.to(h.device).")
    if batch and not torch.compiler.is_compiling():
        each = lengths.tolist()
        if min(each) < 0 or max(each) > time:
            raise BadInput(
                f"lengths go from {min(each)} to {max(each)}, but there are {time} steps. "
                f"Often time and batch are swapped: states are batch-first here."
            )
    return lengths


def _refuse_empty(count: int, what: str) -> None:
    if not count:
        raise BadInput(
            f"no {what} counts, so there is no mean to take: every row is too short. "
            f"Leave such batches out, or look at how the lengths were made."
        )
