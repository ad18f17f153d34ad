"""Batches of other sizes than a schedule was made for: filled up with rows, or cut into pieces, and put together.

Rows that have nothing to do with each other may run beside any others. So one schedule serves all batch sizes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace

import torch
from torch import Tensor

from ..state import State
from .checks import Task

_CALL = 8  # rows that take about as long as it takes to call a schedule once more


def best_size(rows: int, sizes: Iterable[int]) -> int:
    """Return the size of batches by which so many rows are run soonest."""
    return min(sizes, key=lambda size: (_pieces(rows, size) * (size + _CALL), size))


def share_used(rows: int, size: int) -> float:
    """Return which part of the work is on rows that are asked for."""
    return rows / (_pieces(rows, size) * size)


def run_resized(
    task: Task, size: int, run: Callable[[Task], tuple[Tensor, State]], initial: Callable[[int], State]
) -> tuple[Tensor, State]:
    """Run a task in batches of a size; rows that fill up are copies of the first, and lead nowhere."""
    batch = task.x.shape[0]
    whole = replace(task, state=(task.initial or initial)(batch) if task.state is None else task.state)
    outputs, states = [], []
    for first in range(0, batch, size):
        rows = torch.arange(first, first + size, device="cpu")
        rows[batch - first :] = first
        out, state = run(of_rows(whole, rows))
        count = min(size, batch - first)
        outputs.append(out[:count])
        states.append(state.select(slice(0, count)))
    # What a user gets is nobody else's, and without gaps.
    return torch.cat(outputs), State.cat(states)


def of_rows(task: Task, rows: Tensor) -> Task:
    """Return some rows of a task, each as often as it is asked for."""
    assert task.state is not None
    return replace(
        task,
        x=task.x.index_select(0, rows.to(task.x.device)),
        state=task.state.select(rows),
        lengths=None if task.lengths is None else task.lengths[rows],
        resets=None if task.resets is None else task.resets[rows],
    )


def _pieces(rows: int, size: int) -> int:
    return -(-rows // size)
