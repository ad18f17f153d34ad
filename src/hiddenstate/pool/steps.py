"""The input of every pool: states along time, the true length of each row, and which steps are real."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence, pad_packed_sequence

from .._compiling import compiling
from .._torch_names import lookup
from ..errors import BadInput
from ..recording import Recording, Trajectory, refuse_time_first, the_track, trainable

Source: TypeAlias = "Tensor | Trajectory | Recording | PackedSequence"
Lengths: TypeAlias = "Tensor | Sequence[int]"

_assert_async = lookup("torch.ops.aten._assert_async")


class Steps(NamedTuple):
    """States along time; without lengths, every row has all steps."""

    h: Tensor  # (batch, time, unit)
    lengths: Tensor | None  # (batch,) int64, each from 1 to time

    @property
    def valid(self) -> Tensor:
        """Which steps are real: bool (batch, time)."""
        steps = torch.arange(self.h.shape[1], device=self.h.device)
        if self.lengths is None:
            return (steps >= 0).expand(self.h.shape[:2])
        return steps < self.lengths.unsqueeze(1)

    def filled(self, value: float) -> Tensor:
        """Return the states with `value` as padding; no gradient reaches the padding, not even NaN."""
        if self.lengths is None:
            return self.h
        return torch.where(self.valid.unsqueeze(-1), self.h, value)

    @property
    def may_look(self) -> bool:
        """Whether reading values is cheap and allowed: not on a GPU, which would have to be synchronized."""
        return self.h.device.type == "cpu" and not captured()

    @property
    def wants_grad(self) -> bool:
        """Whether a gradient will go back to the states."""
        return self.h.requires_grad and torch.is_grad_enabled()

    def reduced(self, quick: Callable[[Tensor], Tensor], exact: Callable[[Tensor], Tensor], fill: float) -> Tensor:
        """Return `quick` of the states as they are or, if that is not finite, `exact` of the states filled with `fill`.

        `quick` ignores finite padding, and makes NaN or Inf of any other padding. So one look at its small result tells
        whether the states must be copied, which costs more than most pooling.
        """
        if self.lengths is None:
            return exact(self.h)
        if self.may_look and self.h.dtype in (torch.float32, torch.float64):
            result = quick(self.h)
            if math.isfinite(result.detach().sum().item()):  # one number, which any NaN or Inf would make NaN or Inf
                return result
        return exact(self.filled(fill))


def uncast() -> AbstractContextManager[object]:
    """Return a context in which autocast on the CPU leaves everything but matrix products in its own precision."""
    return torch.autocast("cpu", enabled=False) if torch.is_autocast_enabled("cpu") else nullcontext()


def assert_later(condition: Tensor, message: str) -> None:
    """Put a check into the graph that is being captured, if this version of torch can do that."""
    if _assert_async is not None:
        _assert_async.msg(condition, message)


def captured() -> bool:
    """Say whether a graph of this code is being captured (compiled, exported or traced), so that values are unknown."""
    return compiling() or traced()


def traced() -> bool:
    """Say whether torch.jit.trace is running: it treats shapes as values, and warns of every comparison."""
    return bool(torch.jit.is_tracing())  # type: ignore[attr-defined, no-untyped-call]


def read_steps(h: Source, lengths: Lengths | None) -> Steps:
    """Return a tensor, trajectory or packed sequence as steps, or raise if it cannot be pooled."""
    if isinstance(h, Tensor):
        _check_states(trainable(h))
        refuse_time_first(h)
        return Steps(h, None if lengths is None else _read_lengths(lengths, h))
    h = the_track(h)
    if lengths is not None:
        raise BadInput(
            f"lengths were given with a {type(h).__name__}, which knows its own. "
            f"Leave them out, or pool a padded tensor."
        )
    if isinstance(h, PackedSequence):
        padded, own = pad_packed_sequence(h, batch_first=True)
        return Steps(padded, own.to(padded.device))
    if isinstance(h, Trajectory):
        assert h.lengths is not None
        _check_states(h.trainable())
        return Steps(h.h, _read_lengths(h.lengths.to(h.h.device), h.h))
    raise BadInput(
        f"a tensor (batch, time, unit), a Trajectory or a PackedSequence can be pooled, "
        f"but this is {type(h).__name__}. A recurrent layer returns (output, state): give its output."
    )


def _check_states(h: Tensor) -> None:
    if traced():
        return
    if h.dim() != 3:
        raise BadInput(
            f"states to pool are (batch, time, unit), but these have shape {tuple(h.shape)}. "
            f"One sequence without a batch axis becomes one with h.unsqueeze(0)."
        )
    if h.shape[1] == 0:
        raise BadInput(f"states of shape {tuple(h.shape)} have no steps, so there is nothing to pool.")
    if not h.is_floating_point():
        raise BadInput(f"states to pool are floating point numbers, but these are {h.dtype}. Use h.float().")


def _read_lengths(lengths: Lengths, h: Tensor) -> Tensor:
    if not isinstance(lengths, Tensor):
        lengths = torch.as_tensor(lengths, device=h.device)
    if lengths.dtype == torch.bool:
        raise BadInput(
            "lengths are bool, so a mask was meant. The lengths of a mask (batch, time) are mask.sum(dim=1)."
        )
    if lengths.is_floating_point() or lengths.is_complex():
        raise BadInput(f"lengths are {lengths.dtype}, but whole numbers are needed: lengths.long().")
    if lengths.device != h.device:
        raise BadInput(
            f"lengths are on {lengths.device}, but the states are on {h.device}. "
            f"Move them once for all pools: lengths.to({str(h.device)!r})."
        )
    if not traced():
        _check_lengths(lengths, h)
    return lengths.long()


def _check_lengths(lengths: Tensor, h: Tensor) -> None:
    batch, time = h.shape[:2]
    if lengths.dim() != 1 or lengths.shape[0] != batch:
        raise BadInput(
            f"lengths have shape {tuple(lengths.shape)}, but the states have {batch} rows {tuple(h.shape)}: one length "
            f"for each row is needed. Where time comes first, transpose: h.transpose(0, 1)."
        )
    if captured():
        inside = ((lengths >= 1) & (lengths <= time)).all()
        assert_later(inside, "a length is below 1 or above the number of steps")
    elif batch and lengths.device.type != "meta":
        each = lengths.tolist()
        low, high = min(each), max(each)
        if low < 1:
            raise BadInput(
                f"row {each.index(low)} has length {low}, but a row needs at least one step to be pooled. "
                f"Drop empty sequences first: keep = lengths > 0; h[keep], lengths[keep]."
            )
        if high > time:
            raise BadInput(
                f"row {each.index(high)} has length {high}, but there are {time} steps. Often time and batch are "
                f"swapped (pools are batch-first), or lengths were counted before the sequences were cut."
            )
