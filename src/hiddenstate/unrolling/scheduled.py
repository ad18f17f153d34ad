"""Running a cell by its schedule: when one is made, when its loops are compiled, what is said where there is none."""

from __future__ import annotations

import warnings
from typing import Literal

import torch
from torch import Tensor

from ..cells import Layer, unheard, untouched
from ..errors import UnrollWarning, Untraceable
from ..state import State
from .building import build, compile_loops
from .cache import Entry, entry_for, settle
from .checks import Task
from .fast import Run, execute, prepare
from .loop import run_loop
from .observing import observed
from .step import StateChanges

# How many steps of one shape run in the plain loop before a trace, and before compiled loops, are worth their time.
_TRACE_AFTER, _COMPILE_AFTER = 1_000, 10_000


def run_auto(layer: Layer, task: Task) -> tuple[Tensor, State]:
    """Run a cell in the plain loop until a schedule is worth its making, and by the schedule from then on."""
    run = prepare(layer, task)
    entry = entry_for(run)
    if entry.refusal is None and (entry.schedule is not None or entry.steps >= _TRACE_AFTER):
        try:
            return _shown(layer, task, _execute(entry, run, compiled=entry.steps >= _COMPILE_AFTER))
        except StateChanges:
            return _after_one_step(layer, task, "auto")
        except Untraceable as refusal:
            _note(layer, refusal)
    elif isinstance(entry.refusal, StateChanges):
        return _after_one_step(layer, task, "auto")
    entry.steps += task.x.shape[1]
    return run_loop(layer, task)


def run_fast(layer: Layer, task: Task) -> tuple[Tensor, State]:
    """Run a cell by its schedule, made now where there is none."""
    run = prepare(layer, task)
    try:
        return _shown(layer, task, _execute(entry_for(run), run, compiled=True))
    except StateChanges:
        if task.x.shape[1] == 1:
            raise
        return _after_one_step(layer, task, "fast")


def _execute(entry: Entry, run: Run, *, compiled: bool) -> tuple[Tensor, State]:
    with unheard():
        schedule = settle(entry, lambda: build(run))
        entry.steps += run.x.shape[1]
        if compiled and not entry.compiled:
            with entry.lock:
                if not entry.compiled:
                    compile_loops(schedule, run)
                    entry.compiled = True
        return execute(schedule, run)


def _shown(layer: Layer, task: Task, result: tuple[Tensor, State]) -> tuple[Tensor, State]:
    """Show the steps that a schedule has run to the hooks that only look on."""
    if observed(layer.module):
        with torch.no_grad(), untouched(layer.module):
            run_loop(layer, task)
    return result


def _after_one_step(layer: Layer, task: Task, engine: Literal["auto", "fast"]) -> tuple[Tensor, State]:
    """Run the first step plainly: after it a state has the dtype that it keeps, as under autocast."""
    resets = task.resets
    head, state = run_loop(layer, Task(task.x[:, :1], task.state, None, _some(resets, slice(0, 1)), task.initial))
    if task.x.shape[1] == 1:
        return head, state
    lengths = None if task.lengths is None else task.lengths - 1
    rest = Task(task.x[:, 1:], state, lengths, _some(resets, slice(1, None)), task.initial)
    try:
        run = prepare(layer, rest)
        tail, final = _shown(layer, rest, _execute(entry_for(run), run, compiled=engine == "fast"))
    except Untraceable as refusal:
        if engine == "fast":
            raise Untraceable(refusal.reason, refusal.line) from refusal
        _note(layer, refusal)
        return run_loop(layer, task)
    return torch.cat([head, tail], dim=1), final


def _some(resets: Tensor | None, steps: slice) -> Tensor | None:
    if resets is None or not bool(resets[:, steps].any()):
        return None
    return resets[:, steps]


_noted: set[tuple[type, str]] = set()


def _note(layer: Layer, refusal: Untraceable) -> None:
    """Say once for each type of cell and reason that it runs step by step."""
    key = (type(layer.module), refusal.reason)
    if key not in _noted:
        _noted.add(key)
        warnings.warn(
            f"{type(layer.module).__name__} runs step by step, and slower than it might, because {refusal}. "
            f"engine='loop' says that this is fine.",
            UnrollWarning,
            stacklevel=5,
        )
