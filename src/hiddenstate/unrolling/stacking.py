"""Stacking cells into layers and directions, with dropout between layers."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..state import State
from .checks import Task


def run_stack(
    cells: Sequence[nn.Module],
    task: Task,
    run: Callable[[nn.Module, Task], tuple[Tensor, State]],
    *,
    directions: int,
    dropout: float | Callable[[Tensor], Tensor] | None,
) -> tuple[Tensor, State]:
    """Run cells layer by layer, the forward direction before the reverse; states are stacked in that order.

    `run` runs one of them along its part of the task; `dropout` between layers is a probability, or what drops.
    """
    x = task.x
    finals: list[State] = []
    outputs: list[Tensor] = []
    for number, cell in enumerate(cells):
        reverse = number % directions == 1
        if number and not reverse and dropout:
            x = dropout(x) if callable(dropout) else F.dropout(x, dropout)
        piece = Task(backwards(x, task.lengths) if reverse else x, None, task.lengths, task.resets)
        out, final = run(cell, _from(task, piece, number))
        outputs.append(backwards(out, task.lengths) if reverse else out)
        finals.append(final)
        if len(outputs) == directions:
            x = outputs[0] if directions == 1 else torch.cat(outputs, dim=-1)
            outputs = []
    return x, stacked(finals)


def stacked(states: list[State]) -> State:
    """Return states of several cells as one, with a new axis in front."""
    axes = {name: axis + 1 for name, axis in states[0].batch_axis.items()}
    return State.alike({name: torch.stack([state[name] for state in states]) for name in states[0]}, axes)


def _from(whole: Task, piece: Task, number: int) -> Task:
    """Return a piece of work that starts from its own share of the whole stack's state."""
    first = None if whole.state is None else _take(whole.state, number)
    start = whole.initial
    return Task(
        piece.x, first, piece.lengths, piece.resets, None if start is None else lambda rows: _take(start(rows), number)
    )


def _take(state: State, number: int) -> State:
    return State.alike({n: p[number] for n, p in state.items()}, {n: a - 1 for n, a in state.batch_axis.items()})


def backwards(x: Tensor, lengths: Tensor | None) -> Tensor:
    """Return each row's valid steps in the opposite order; padding stays where it is."""
    if lengths is None:
        return x.flip(1)
    batch, steps = x.shape[:2]
    step = torch.arange(steps, device="cpu")
    turned = torch.where(step < lengths[:, None], lengths[:, None] - 1 - step, step)  # (batch, time)
    flat = (turned + steps * torch.arange(batch, device="cpu")[:, None]).flatten()
    return x.flatten(0, 1).index_select(0, flat.to(x.device)).view(x.shape)
