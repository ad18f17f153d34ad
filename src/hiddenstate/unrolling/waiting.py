"""Rows without a step: they wait while the others run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from ..state import State
from .checks import Task
from .observing import placed


def run_others(
    task: Task, run: Callable[[Task], tuple[Tensor, State]], initial: Callable[[int], State]
) -> tuple[Tensor, State]:
    """Run a task's rows that have steps; the state of the others is what came in, and their output zero."""
    lengths = task.lengths
    if lengths is None or int(lengths.min()) > 0:
        return run(task)
    first = (task.initial or initial)(len(lengths)) if task.state is None else task.state
    rows = lengths.nonzero().squeeze(1)
    if len(rows) == 0:  # what an output looks like is seen from a step that nobody keeps
        with torch.no_grad():
            out, _ = run(Task(torch.zeros_like(task.x[:, :1]), first.detach()))
        return torch.zeros_like(out).expand(-1, task.x.shape[1], *out.shape[2:]).contiguous(), first
    place = rows.to(task.x.device)
    some = replace(
        task,
        x=task.x.index_select(0, place),
        state=None if task.state is None else task.state.select(rows),
        lengths=lengths[rows],
        resets=None if task.resets is None else task.resets[rows],
    )
    with placed(rows, len(lengths)):
        out, after = run(some)
    whole = out.new_zeros(len(lengths), *out.shape[1:]).index_copy(0, place, out)
    # Autocast, or a cell of one's own, may have changed the dtype on the way.
    alike = State({name: first[name].to(part.dtype) for name, part in after.items()}, after.batch_axis)
    return whole, alike.put(rows, after)
