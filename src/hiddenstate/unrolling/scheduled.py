"""Running a cell by a schedule: when to make one, when to compile its loops, and what to say if there is none."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from ..cells import Layer, unheard, untouched
from ..errors import UnrollWarning, Untraceable
from ..state import State
from .cache import KnownCell, KnownStep, Paces, cell_known, kind_of, known_for, relatives, settle
from .checks import Task
from .deciding import EngineDecision, LoopTime, built, clock
from .fast import Run, execute, prepare
from .judging import mixes
from .loop import run_loop
from .observing import observed
from .resized import best_size, of_rows, run_resized, share_used
from .schedule import Schedule
from .step import StateChanges, Step
from .unsaved import unsaved

_MOST_GRAPHS = 24  # of one cell, from which on it is said to change too often
_PATIENCE = 10  # times longer until a cell that could not be read, or only with constants, is tried again


def run_auto(layer: Layer, task: Task, obstacle_to: Callable[[Layer, Task], str | None]) -> tuple[Tensor, State]:
    """Run a cell in the plain loop until a schedule is worth its making, and by the schedule where it is faster.

    Whether there is an obstacle to a schedule is asked when one is due: it takes longer than a small step.
    """
    cell = cell_known(layer.module)
    spent = cell.loop_time(kind_of(task.x))
    if task.x.shape[1] >= spent.fewest and spent.is_due(task.x.device.type) and not _may_run_again():
        if obstacle_to(layer, task):
            return run_loop(layer, task)
        try:
            if cell.reader.made > _MOST_GRAPHS:
                raise Untraceable("what it reads changes too often from call to call")
            run = _prepared(layer, task, cell)
            known = _known(cell, run, spent)
            if known.rows != task.x.shape[0]:
                return _shown(layer, task, _resized(layer, task, known.rows, run))
            if known.decision is None and known.refusal is None:
                _make(known, run, timed=True)
                cell.told = _told(known, spent)
            if known.decision is not None and known.decision.takes(task.x.shape[1]):
                return _shown(layer, task, _execute(known, run))
            if isinstance(known.refusal, StateChanges):
                return _after_one_step(layer, task, "auto")
            _settle_for_loop(known, spent)
        except StateChanges:
            return _after_one_step(layer, task, "auto")
        except Untraceable as refusal:
            spent.wait(_PATIENCE)  # to try costs more than many steps
            cell.told = f"step by step, because {refusal.reason}"
            _note(layer, refusal)
    start = clock()
    result = run_loop(layer, task)
    spent.add(clock() - start, task.x.shape[1], grad=result[0].requires_grad)
    return result


@dataclass(frozen=True, slots=True, eq=False)
class Ready:
    """A call that has a schedule, which was measured to be faster."""

    run: Callable[[], tuple[Tensor, State]]
    because: str


def ready(layer: Layer, task: Task) -> Ready | str:
    """Return a call's schedule where there is one and it is faster, else why not; "" where that is not known yet."""
    cell = cell_known(layer.module)
    run = _prepared(layer, task, cell)
    known = _known(cell, run, LoopTime())
    if known.rows != task.x.shape[0]:
        return Ready(partial(_resized, layer, task, known.rows, run), _decision(known).because)
    if known.refusal is not None:
        return known.refusal.reason
    if known.decision is None:
        return ""
    if not known.decision.takes(task.x.shape[1]):
        return f"that is no slower ({known.decision.because})"
    return Ready(partial(_execute, known, run), known.decision.because)


def read_only(layer: Layer, task: Task) -> None:
    """Read a cell, and refuse one that does more than compute; it is not called."""
    prepare(layer, task, cell_known(layer.module).reader).step.try_out()


def settle_now(layer: Layer, task: Task, paces: Paces) -> str:
    """Make a schedule for calls like this one, measure it by `paces`, and say what was found."""
    cell = cell_known(layer.module)
    run = _prepared(layer, task, cell)
    known = known_for(cell, run)
    if known.decision is None:
        _make(known, run, timed=True, paces=paces)
    return _told(known, None)


def _decision(known: KnownStep) -> EngineDecision:
    assert known.decision is not None
    return known.decision


def run_fast(layer: Layer, task: Task) -> tuple[Tensor, State]:
    """Run a cell by its schedule, made now where there is none."""
    cell = cell_known(layer.module)
    try:
        run = _prepared(layer, task, cell)
        known = _known(cell, run, None)
        if known.rows != task.x.shape[0]:
            return _shown(layer, task, _resized(layer, task, known.rows, run))
        return _shown(layer, task, _execute(known, run))
    except StateChanges:
        if task.x.shape[1] == 1:
            raise
        return _after_one_step(layer, task, "fast")


def scheduled_for(layer: Layer, task: Task) -> tuple[Schedule, Step] | None:
    """Return the schedule that a call was run by just now, with its step; None where it is for another batch size."""
    cell = cell_known(layer.module)
    run = _prepared(layer, task, cell)
    known = known_for(cell, run)
    if known.schedule is None or known.rows != task.x.shape[0]:
        return None
    return known.schedule, run.step.without_example()


def _settle_for_loop(known: KnownStep, spent: LoopTime) -> None:
    """Have calls like this one not read the cell to look for a schedule, while the loop is faster."""
    if known.decision is not None and known.decision.fewest is not None:
        spent.fewest = known.decision.fewest
    else:
        spent.wait(_PATIENCE)


def _prepared(layer: Layer, task: Task, cell: KnownCell) -> Run:
    """Lay out a task; numbers that were seen to change are tensors in it, as far as that can be traced."""
    run = prepare(layer, task, cell.reader)
    reading = run.step.reading
    floats = tuple(number for number in reading.constants() if isinstance(number, float))
    if not floats or not reading.graph.is_fluid(repr(floats)):
        return run
    run.step.reading = reading.made_fluid()
    fluid = replace(run, weights=run.step.reading.weights)
    known = known_for(cell, fluid)
    if known.schedule is None and known.refusal is None:
        try:
            _make(known, fluid, timed=False)
        except Untraceable:
            reading.graph.rigid = True
    if known.refusal is None:
        return fluid
    run.step.reading = reading
    return run


def _known(cell: KnownCell, run: Run, spent: LoopTime | None) -> KnownStep:
    """Return the step to run by: the run's own, or one that has a schedule for batches of another size."""
    own = known_for(cell, run)
    if own.schedule is not None or own.refusal is not None or own.resized.is_due(run.x.device.type):
        return own
    if len(cell.made) == 1 or own.apart is False:
        return own
    # Torch reads a single row as something of its own.
    like = (
        run if own.rows > 1 else _prepared(run.step.layer, of_rows(run.task, torch.tensor([0, 0], device="cpu")), cell)
    )
    others = {known.rows: known for known in relatives(cell, like) if spent is None or _is_faster(known, run)}
    if any(known.schedule is not None and known.schedule.trace.draws for known in others.values()):
        return own  # rows that fill up would take random numbers
    if not others:
        return own
    if own.apart is None:
        with unheard(), unsaved():
            own.apart = not mixes(like)
    return others[best_size(own.rows, others)] if own.apart else own


def _is_faster(known: KnownStep, run: Run) -> bool:
    return known.decision is not None and known.decision.takes(run.x.shape[1])


def _resized(layer: Layer, task: Task, size: int, run: Run) -> tuple[Tensor, State]:
    """Run a task by a schedule for batches of another size, and note what a schedule of its own would have saved."""
    cell, start = cell_known(layer.module), clock()

    def piece(some: Task) -> tuple[Tensor, State]:
        part = _prepared(layer, some, cell)
        known = known_for(cell, part)
        return run_loop(layer, some) if known.schedule is None else _execute(known, part)

    with unheard():
        result = run_resized(task, size, piece, layer.initial)
    wasted = (clock() - start) * (1 - share_used(task.x.shape[0], size))
    known_for(cell, run).resized.add(wasted, 0, grad=result[0].requires_grad)
    return result


def _make(known: KnownStep, run: Run, *, timed: bool, paces: Paces | None = None) -> None:
    """Make a schedule, and note how long it took, but for what has to be loaded once."""
    start = clock()
    with unheard(), unsaved():
        settle(known, run, timed=timed, paces=paces)
    built(run.x.device.type, clock() - start)


def _told(known: KnownStep, spent: LoopTime | None) -> str:
    decision = _decision(known)
    when = "" if spent is None else f", decided after {spent.calls} calls"
    if decision.fewest is None:
        return f"step by step{when}: a schedule is no faster ({decision.because})"
    return f"by the schedule from {decision.fewest} steps on{when}: {decision.because}"


def _execute(known: KnownStep, run: Run) -> tuple[Tensor, State]:
    if known.schedule is None:
        _make(known, run, timed=False)
    assert known.schedule is not None
    with unheard():
        return execute(known.schedule, run)


def _may_run_again() -> bool:
    """Say whether a call may be made once more in a backward pass, which must then go the same way."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True) is not None


def _shown(layer: Layer, task: Task, result: tuple[Tensor, State]) -> tuple[Tensor, State]:
    """Show the steps that a schedule has run to the hooks that only look on."""
    if observed(layer.module):
        with torch.no_grad(), untouched(layer.module):
            run_loop(layer, task)
    return result


def _after_one_step(layer: Layer, task: Task, engine: Literal["auto", "fast"]) -> tuple[Tensor, State]:
    """Run the first step plainly: after it a state has the dtype that it keeps, as under autocast."""
    resets, cell = task.resets, cell_known(layer.module)
    head, state = run_loop(layer, Task(task.x[:, :1], task.state, None, _some(resets, slice(0, 1)), task.initial))
    if task.x.shape[1] == 1:
        return head, state
    lengths = None if task.lengths is None else task.lengths - 1
    rest = Task(task.x[:, 1:], state, lengths, _some(resets, slice(1, None)), task.initial)
    try:
        run = prepare(layer, rest, cell.reader)
        tail, final = _shown(layer, rest, _execute(known_for(cell, run), run))
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
