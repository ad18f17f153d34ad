"""The penalty terms: plain functions of states along time, without coefficients. Padding never counts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TypeAlias

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence, pad_packed_sequence

from .._compiling import compiling
from ..errors import BadInput
from ..recording import Recording, Trajectory, refuse_time_first, the_track, trainable

Source: TypeAlias = "Tensor | Trajectory | Recording | PackedSequence"
Lengths: TypeAlias = "Tensor | Sequence[int]"


def activity(h: Source, lengths: Lengths | None = None, *, batch_first: bool = True) -> Tensor:
    """Return the mean square of the states over all real steps and units, which penalizes large activity.

    States are (batch, time, unit), or (time, batch, unit) with `batch_first=False`, the default of torch's layers.

    >>> activity(torch.tensor([[[1.0], [3.0], [9.0]]]), [2])
    tensor(5.)
    """
    states, valid = _read_states(h, lengths, batch_first=batch_first, ordered=False)
    steps = states.shape[0] * states.shape[1] if valid is None else valid.sum()
    if not compiling() and not int(steps):
        raise BadInput(
            "no step counts, so there is no mean to take: every row is empty. Leave such batches out, or look at how "
            "the lengths were made."
        )
    return _mean_over(states.square(), valid)


def temporal(h: Source, lengths: Lengths | None = None, *, batch_first: bool = True) -> Tensor:
    """Return the mean square change from one step to the next, which penalizes quick changes. For single steps it is 0.

    >>> temporal(torch.tensor([[[1.0], [3.0], [9.0]]]), [2])
    tensor(4.)
    """
    states, valid = _read_states(h, lengths, batch_first=batch_first)
    return _mean_over_pairs((states[:, 1:] - states[:, :-1]).square(), valid)


def norm_stabilizer(h: Source, lengths: Lengths | None = None, *, batch_first: bool = True) -> Tensor:
    """Return the mean square change of the state's norm from one step to the next. For single steps it is 0.

    >>> norm_stabilizer(torch.tensor([[[3.0, 4.0], [0.0, 5.0], [0.0, 8.0]]]))
    tensor(4.5000)
    """
    states, valid = _read_states(h, lengths, batch_first=batch_first)
    norms = torch.linalg.vector_norm(states, dim=-1)  # (batch, time)
    return _mean_over_pairs((norms[:, 1:] - norms[:, :-1]).square(), valid)


def _mean_over_pairs(values: Tensor, valid: Tensor | None) -> Tensor:
    if valid is None:
        return _mean_over(values, None)
    pairs = valid[:, 1:]  # if a step is real, so is the one before it
    pairs_like = pairs.reshape(*pairs.shape, *(1,) * (values.dim() - 2))
    return _mean_over(torch.where(pairs_like, values, 0.0), pairs)


def _read_states(
    h: Source, lengths: Lengths | None, *, batch_first: bool, ordered: bool = True
) -> tuple[Tensor, Tensor | None]:
    """Return states (batch, time, unit) with zero padding, and which steps count: bool (batch, time), or None for all.

    The zeros are selected, not multiplied in, so neither NaN in the padding nor a gradient into it passes.
    """
    if not isinstance(h, Tensor):
        h, lengths = _unwrapped(h, lengths)
    else:
        h = trainable(h).transpose(0, 1) if h.dim() == 3 and not batch_first else trainable(h)
        if batch_first and (ordered or lengths is not None):
            refuse_time_first(h, "batch_first=False")
    if h.dim() != 3 or not h.is_floating_point():
        raise BadInput(
            f"states are floating point numbers (batch, time, unit), but these are {h.dtype} of shape "
            f"{tuple(h.shape)}. One sequence without a batch axis becomes one with h.unsqueeze(0)."
        )
    h = h.to(torch.promote_types(h.dtype, torch.float32))  # squares overflow easily in half precision
    if lengths is None:
        return h, None
    lengths = _read_lengths(lengths, h)
    valid = torch.arange(h.shape[1], device=h.device) < lengths.unsqueeze(1)
    return torch.where(valid.unsqueeze(-1), h, 0.0), valid


def _mean_over(values: Tensor, valid: Tensor | None) -> Tensor:
    """Return the mean of `values (batch, time, ...)` over valid steps, given zeros elsewhere; 0 if there are none."""
    if valid is None:
        return values.mean() if values.numel() else values.sum()
    count = valid.sum() * math.prod(values.shape[2:])
    return values.sum() / count.clamp(min=1)


def _unwrapped(h: Trajectory | Recording | PackedSequence, lengths: Lengths | None) -> tuple[Tensor, Tensor]:
    if lengths is not None:
        raise BadInput(f"lengths were given with a {type(h).__name__}, which knows its own. Leave them out.")
    h = the_track(h)
    if isinstance(h, PackedSequence):
        padded, own = pad_packed_sequence(h, batch_first=True)
        return padded, own.to(padded.device)
    if isinstance(h, Trajectory):
        assert h.lengths is not None
        return h.trainable(), h.lengths.to(h.h.device)
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
    if batch and not compiling():
        each = lengths.tolist()
        if min(each) < 0 or max(each) > time:
            raise BadInput(
                f"lengths go from {min(each)} to {max(each)}, but there are {time} steps. "
                f"Often time and batch are swapped: batch_first=False is for (time, batch, unit)."
            )
    return lengths
