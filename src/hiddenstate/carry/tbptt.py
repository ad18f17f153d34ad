"""Truncated backpropagation through time, over as many steps back as wanted."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ..cells import InputAxes, StartedModel, input_axes, is_step, layers, started, unheard, untouched, unwrap
from ..errors import BadInput
from .carry import Carry
from .kept import Kept


def tbptt(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    loss: Callable[[Any, Tensor], Tensor],
    *,
    k1: int,
    k2: int | None = None,
    time_axis: int | None = None,
    batch_axis: int | None = None,
) -> Iterator[Tensor]:
    """Train along `x` in pieces of `k1` steps: yields each piece's loss after its backward through the last `k2` steps.

    The optimizer is left to you:

    >>> model = torch.nn.GRU(3, 4, batch_first=True)
    >>> x, y = torch.randn(2, 20, 3), torch.randn(2, 20, 4)
    >>> optimizer = torch.optim.SGD(model.parameters(), 0.1)
    >>> for loss in tbptt(model, x, y, lambda out, y: (out[0] - y).square().mean(), k1=5, k2=10):
    ...     optimizer.step()
    ...     optimizer.zero_grad()

    With `k2 > k1`, the older steps are run again from the state kept at that point. `loss(output, y)` gets the model's
    result for the piece. A `Carry` attached to the model is used, and ends in the state after the last step. If forward
    requires a state, it gets one.

    Which axis is time is deduced as in `check_split`, from `batch_first` of the layers and from how the model takes
    `x`; `time_axis=` or `batch_axis=` overrides this. `y` has its steps on the same axis.
    """
    k2 = k1 if k2 is None else k2
    _check_lengths(k1, k2)
    name = type(unwrap(model)).__name__
    if is_step(unwrap(model), x) and not _steps_itself(model, x):
        raise BadInput(
            f"{name} takes one step at a time, but a piece has several: let a model step it in its forward, "
            f"or make a layer of it, hs.Recurrent({name}, input_size, hidden_size)."
        )
    call = started(model, x)
    axes = input_axes(model, x, time_axis=time_axis, batch_axis=batch_axis, call=call)
    _check(x, y, axes)
    if not call.goes_on():
        raise BadInput(
            f"{name}.forward insists on a state, and takes neither None nor the states of its layers, so its pieces "
            f"cannot go on from each other. Let it take None, and pass that on to its layer."
        )
    return _updates(_Training(call, x, y, loss, axes.time), k1, k2)


@dataclass(slots=True)
class _Training:
    """What all updates share."""

    call: StartedModel
    x: Tensor
    y: Tensor
    loss: Callable[[Any, Tensor], Tensor]
    axis: int
    carry: Carry = field(init=False)
    # For each step that some gradient goes back to: the states kept when that step was first reached.
    points: dict[int, Kept] = field(default_factory=dict)

    def piece(self, oldest: int, begin: int, end: int) -> Tensor:
        """Run from `oldest`, compute the loss from `begin` on, and run its backward pass."""
        self.carry.restore(self.points[oldest])
        with self.carry.with_graph():
            if oldest < begin:
                self.run(oldest, begin)
            self.note_inside(begin, end)
            value = self.judge(self.run(begin, end), self.y.narrow(self.axis, begin, end - begin))
            value.backward()  # type: ignore[no-untyped-call]
        self.note(end)
        return value.detach()

    def judge(self, output: Any, target: Tensor) -> Tensor:
        """Return the loss; if it raises, say what it was given."""
        try:
            return self.loss(output, target)
        except (AttributeError, TypeError) as error:
            if isinstance(output, Tensor):
                raise
            name, kind = type(self.call.model).__name__, type(output).__name__
            raise BadInput(
                f"the loss failed on what {name} returned, which is a {kind}: {error}. It gets all of it; where the "
                f"output comes first: loss=lambda out, y: your_loss(out[0], y)."
            ) from error

    def run(self, begin: int, end: int) -> Any:
        """Run the model on these steps."""
        states = self.carry.snapshot().states if self.call.hands_over else None
        return self.call(self.x.narrow(self.axis, begin, end - begin), states)

    def note(self, step: int) -> None:
        """Save the states kept at this step, detached, and continue from them."""
        self.points[step] = self.carry.snapshot().detach()
        self.carry.restore(self.points[step])

    def note_inside(self, begin: int, end: int) -> None:
        """Save the states inside a piece that later gradients go back to; there are none if k1 divides k2."""
        outer = self.carry.snapshot()
        for step in sorted(step for step in self.points if begin < step < end):
            with untouched(self.call.model), torch.no_grad():
                self.run(begin, step)
            self.note(step)
            begin = step
        self.carry.restore(outer)


def _updates(training: _Training, k1: int, k2: int) -> Iterator[Tensor]:
    steps = training.x.shape[training.axis]
    attached = Carry.of(training.call.model)
    carry = training.carry = attached or Carry(training.call.model)
    pieces = [(begin, min(begin + k1, steps)) for begin in range(0, steps, k1)]
    try:
        training.points = {max(0, end - k2): Kept() for _, end in pieces} | {0: carry.snapshot()}
        for begin, end in pieces:
            oldest = max(0, end - k2)
            yield training.piece(oldest, begin, end)
            carry.restore(training.points[end])  # the user's code may have run the model in between
            training.points = {step: kept for step, kept in training.points.items() if step >= oldest}
    finally:
        if attached is None:
            carry.close()


def _steps_itself(model: nn.Module, x: Tensor) -> bool:
    """Say whether a module named like a cell runs along time nevertheless."""
    try:
        with unheard():
            found = layers(model, x)
    except Exception:  # it is a cell that does not take several steps
        return False
    return any(layer.seen is not None and layer.seen.steps > 1 for layer in found)


def _check_lengths(k1: int, k2: int) -> None:
    if k1 < 1:
        raise BadInput(f"k1 is {k1}, but an update needs 1 step or more.")
    if k2 < k1:
        raise BadInput(
            f"k2 is {k2} and k1 is {k1}, but a gradient goes back through at least the steps of its own loss: k2 >= k1."
        )


def _check(x: Tensor, y: Tensor, axes: InputAxes) -> None:
    axis = axes.time
    if x.dim() <= axis or y.dim() <= axis or x.shape[axis] != y.shape[axis]:
        raise BadInput(
            f"x has shape {tuple(x.shape)} and y {tuple(y.shape)}, but both need the same number of steps along axis "
            f"{axis}, one target for each step ({axes}). time_axis= says which axis is time where that is wrong."
        )
    if x.shape[axis] == 0:
        raise BadInput(f"x has shape {tuple(x.shape)}: there is no step to train on.")
