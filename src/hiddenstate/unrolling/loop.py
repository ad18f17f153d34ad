"""The plain loop in Python, one call of the cell for each step: the reference for all engines."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..cells import Cell, Layer, invented_inputs, unheard, untouched
from ..errors import BadInput, HiddenStateError, NotRecurrent, StateMismatch
from ..state import State
from .checks import Task
from .observing import placed
from .packing import plan


class NamedCell:
    """A layer of one step as a `Cell` whose state is a `State`, called through `__call__` so that its hooks fire."""

    def __init__(self, layer: Layer) -> None:
        """Step this layer."""
        self.layer = layer

    def initial_state(self, batch: int) -> State:
        """Return the cell's own initial state."""
        return self.layer.initial(batch)

    def __call__(self, x: Tensor, state: State) -> tuple[Tensor, State]:
        """Call the cell, and tell its output from its state."""
        out, native = self.layer.call(x, self.layer.to_native(state))
        after = self.layer.to_state(native, batch=x.shape[0])
        return rows_first(self.layer, out, after, x.shape[0]), after


def run_loop(layer: Layer, task: Task) -> tuple[Tensor, State]:
    """Run a cell along a task, step by step."""
    try:
        return run_steps(NamedCell(layer), task)
    except (RuntimeError, ValueError, TypeError) as error:
        explain_failure(layer, task, error)
        raise


def explain_failure(layer: Layer, task: Task, error: Exception) -> None:
    """Raise what says why a step failed, where that is known."""
    explain_mismatch(layer, task, error)
    explain_width(layer, task, error)
    explain_transform(layer, error)


def run_steps(cell: Cell[State], task: Task) -> tuple[Tensor, State]:
    """Run a cell whose state is a `State`; each step sees only the rows that have not ended."""
    if task.lengths is None:
        return _run_even(cell, task)
    # Longest rows first, so that the rows still running are always the first ones; padding is never computed.
    order = task.lengths.argsort(descending=True, stable=True)
    with placed(order, len(order)):
        return _run_uneven(cell, task, task.lengths, order)


def _run_uneven(cell: Cell[State], task: Task, lengths: Tensor, order: Tensor) -> tuple[Tensor, State]:
    batch, steps = task.x.shape[:2]
    place = order.argsort()
    longest = int(lengths.max())
    state = ((task.initial or cell.initial_state)(batch) if task.state is None else task.state).select(order)
    resets = None if task.resets is None else task.resets[order]
    packing = plan(Task(task.x, None, lengths))
    alive = packing.batch_sizes.tolist()
    outputs: list[Tensor] = []
    ended: list[State] = []
    rows = task.x.index_select(0, order.to(task.x.device))
    for t, x in enumerate(rows[:, :longest].unbind(1)):
        if alive[t] < state.batch:
            ended.append(state.select(slice(alive[t], None)))
            state = state.select(slice(0, alive[t]))
        if resets is not None:
            state = _restart(task.initial or cell.initial_state, state, resets[: alive[t], t])
        out, state = cell(x[: alive[t]], state)
        outputs.append(out)
    final = State.cat([state, *reversed(ended)]).select(place)
    return packing.unpack(torch.cat(outputs), batch, steps), final


def _run_even(cell: Cell[State], task: Task) -> tuple[Tensor, State]:
    state = (task.initial or cell.initial_state)(task.x.shape[0]) if task.state is None else task.state
    outputs: list[Tensor] = []
    for t, x in enumerate(task.x.unbind(1)):
        if task.resets is not None:
            state = _restart(task.initial or cell.initial_state, state, task.resets[:, t])
        out, state = cell(x, state)
        outputs.append(out)
    return torch.stack(outputs, dim=1), state


def _restart(start: Callable[[int], State], state: State, anew: Tensor) -> State:
    rows = anew.nonzero().squeeze(1)
    if len(rows) == 0:
        return state
    initial = start(len(rows))
    return State(
        {
            name: part.index_copy(state.batch_axis[name], rows.to(part.device), initial[name].to(part.dtype))
            for name, part in state.items()
        },
        state.batch_axis,
    )


def rows_first(layer: Layer, out: Any, state: State, batch: int) -> Tensor:
    """Return a step's output with its rows on axis 0, or say what is wrong with it."""
    if isinstance(out, Tensor):
        for name, part in state.items():
            if part is out:
                axis = state.batch_axis[name]
                return out.movedim(axis, 0) if axis else out
        if out.dim() and out.shape[0] == batch:
            return out
    seen = f"of shape {tuple(out.shape)}" if isinstance(out, Tensor) else f"that is {type(out).__name__}"
    raise NotRecurrent(
        f"{type(layer.module).__name__} returned an output {seen} for {batch} rows, but a tensor (batch, ...) is "
        f"needed. An output of several tensors can be joined: torch.cat(outputs, dim=-1)."
    )


def explain_mismatch(layer: Layer, task: Task, error: Exception) -> None:
    """Raise a StateMismatch where a given state that is unlike the cell's own is why a step failed."""
    if task.state is None or isinstance(error, StateMismatch | NotRecurrent):
        return
    try:
        expected = layer.initial(task.state.batch)
    except Exception:  # then nobody knows what the state should have been
        return
    for name, part in task.state.items():
        own = expected.get(name)
        if own is not None and (own.shape, own.dtype, own.device) != (part.shape, part.dtype, part.device):
            raise StateMismatch(
                f"part {name!r} of the given state is {tuple(part.shape)} {part.dtype} on {part.device}, but "
                f"{type(layer.module).__name__} starts from {tuple(own.shape)} {own.dtype} on {own.device}, "
                f"and failed with the given one: {error}"
            ) from error


def explain_transform(layer: Layer, error: Exception) -> None:
    """Raise a BadInput where a transform of torch.func has no rule for an operation of a step."""
    if "Batching rule not implemented" in str(error):
        raise BadInput(
            f"a step of {type(layer.module).__name__} has an operation for which torch.func.vmap has no rule: {error} "
            f"Write the cell in plain operations, or join the axis with the rows, x.flatten(0, 1)."
        ) from error


def explain_width(layer: Layer, task: Task, error: Exception) -> None:
    """Raise a BadInput where the input has another width than the cell takes, and that is why a step failed."""
    width = task.x.shape[-1]
    if not task.x.is_floating_point() or isinstance(error, HiddenStateError):
        return
    wanted = layer.spec.input_size
    if wanted is None and task.x.dim() == 3:
        wanted = _width_tried(layer, width)
    if wanted is None or width == wanted:
        return
    turned = " Axis 1 has that many: it may be time, x.transpose(1, 2)." if task.x.shape[1] == wanted else ""
    raise BadInput(
        f"x is {tuple(task.x.shape)}, (batch, time, feature), so each step has {width} features, but "
        f"{type(layer.module).__name__} takes {wanted}, and failed with it: {error}.{turned}"
    ) from error


def _width_tried(layer: Layer, given: int) -> int | None:
    """Return the width that a cell takes which names none, where it fails at the given one; None if no other runs."""

    def runs(x: Tensor) -> bool:
        try:
            layer.call(x, layer.to_native(layer.initial(len(x))))
        except Exception:  # a trial: sizes that are read off weights are guesses
            return False
        return True

    with untouched(layer.module), unheard(), torch.no_grad():
        steps = [x for x in invented_inputs(layer.module, 2) if x.is_floating_point() and x.dim() == 2]
        if not steps or runs(steps[0].new_zeros(2, given)):
            return None  # it fails of something else
        return next((x.shape[1] for x in steps if x.shape[1] != given and runs(x)), None)
