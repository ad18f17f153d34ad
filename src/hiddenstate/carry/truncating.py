"""Truncated backpropagation through time, with as many steps back as one wants."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from ..cells import undisturbed
from ..errors import BadInput
from .carrying import Carry
from .keeping import Kept


def tbptt(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    loss: Callable[[Any, Tensor], Tensor],
    *,
    k1: int,
    k2: int | None = None,
    time_axis: int = 1,
) -> Iterator[Tensor]:
    """Train along `x` in pieces of `k1` steps: yields each piece's loss after its backward through the last `k2` steps.

    The optimizer stays yours:

    >>> model = torch.nn.GRU(3, 4, batch_first=True)
    >>> x, y = torch.randn(2, 20, 3), torch.randn(2, 20, 4)
    >>> optimizer = torch.optim.SGD(model.parameters(), 0.1)
    >>> for loss in tbptt(model, x, y, lambda out, y: (out[0] - y).square().mean(), k1=5, k2=10):
    ...     optimizer.step()
    ...     optimizer.zero_grad()

    With `k2 > k1` the older steps are run again from the state kept at that point. `loss(output, y)` gets what the model
    returned for the piece. A `Carry` attached to the model is used, and ends in the state after the last step.
    """
    k2 = k1 if k2 is None else k2
    _check(x, y, (k1, k2), time_axis)
    return _updates(model, (x, y), loss, (k1, k2), time_axis)


def _updates(
    model: nn.Module, data: tuple[Tensor, Tensor], loss: Callable[[Any, Tensor], Tensor], k: tuple[int, int], axis: int
) -> Iterator[Tensor]:
    x, y = data
    steps = x.shape[axis]
    ends = [min(begin + k[0], steps) for begin in range(0, steps, k[0])]
    needed = {max(0, end - k[1]) for end in ends}
    attached = Carry.of(model)
    carry = attached or Carry(model)
    try:
        marks: dict[int, Kept] = {0: carry._kept}
        for begin, end in zip(range(0, steps, k[0]), ends, strict=True):
            oldest = max(0, end - k[1])
            _mark_inside(model, carry, x, marks, (begin, sorted(s for s in needed if begin < s < end)), axis)
            value = _piece(model, carry, (x, y), loss, (oldest, begin, end, axis), marks[oldest])
            marks[end] = carry._kept
            later = {end, *(s for s in needed if s > oldest)}
            marks = {step: kept for step, kept in marks.items() if step in later or (oldest == 0 and step == 0)}
            yield value
            carry._kept = marks[end]
    finally:
        if attached is None:
            carry.close()


def _piece(
    model: nn.Module,
    carry: Carry,
    data: tuple[Tensor, Tensor],
    loss: Callable[[Any, Tensor], Tensor],
    span: tuple[int, int, int, int],
    kept: Kept,
) -> Tensor:
    (x, y), (oldest, begin, end, axis) = data, span
    carry._kept = kept.copy()
    with carry._with_graph():
        if oldest < begin:
            model(x.narrow(axis, oldest, begin - oldest))
        value = loss(model(x.narrow(axis, begin, end - begin)), y.narrow(axis, begin, end - begin))
        value.backward()  # type: ignore[no-untyped-call]
    carry._kept = carry._kept.detach()
    return value.detach()


def _mark_inside(
    model: nn.Module, carry: Carry, x: Tensor, marks: dict[int, Kept], inside: tuple[int, list[int]], axis: int
) -> None:
    """Note the states at steps within a piece from which a later gradient starts; only where k1 does not divide k2."""
    begin, steps = inside
    for step in steps:
        carry._kept = marks[begin].copy()
        with undisturbed(model), torch.no_grad():
            model(x.narrow(axis, begin, step - begin))
        marks[step] = carry._kept
        begin = step


def _check(x: Tensor, y: Tensor, k: tuple[int, int], axis: int) -> None:
    k1, k2 = k
    if k1 < 1:
        raise BadInput(f"k1 is {k1}, but an update needs 1 step or more.")
    if k2 < k1:
        raise BadInput(
            f"k2 is {k2} and k1 is {k1}, but the gradient goes back through at least the steps of its own loss: k2 >= k1."
        )
    if x.dim() <= axis or y.dim() <= axis or x.shape[axis] != y.shape[axis]:
        raise BadInput(
            f"x has shape {tuple(x.shape)} and y {tuple(y.shape)}, but both need the same number of steps along axis "
            f"{axis}: one target for each step. A model that takes (time, batch, …) wants time_axis=0."
        )
    if x.shape[axis] == 0:
        raise BadInput(f"x has shape {tuple(x.shape)}: there is no step to train on.")
