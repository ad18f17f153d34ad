"""The cache of schedules: looked up by everything they depend on, and limited in number."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import TypeAlias
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from ..errors import Untraceable
from .building import build, compile_loops
from .deciding import EngineDecision, LoopTime, Pace, counted, decide
from .fast import Run
from .judging import Judge
from .precision import is_exact
from .reading import StepReader
from .schedule import Schedule

_MOST = 32  # schedules of one cell; beyond, those not used for longest are forgotten
_WIN = 0.8  # of the time of what the user wrote that a schedule has to stay below: clocks err
Paces: TypeAlias = Callable[[], tuple[Pace, Pace]]


@dataclass(slots=True, eq=False)
class KnownStep:
    """What is known of one graph of a cell under one set of conditions."""

    rows: int  # of the batches that its schedule is made for
    lock: threading.Lock = field(default_factory=threading.Lock)
    schedule: Schedule | None = None
    refusal: Untraceable | None = None
    apart: bool | None = None  # whether its rows have nothing to do with each other, where that was asked for
    decision: EngineDecision | None = None  # whether it is the faster way, where that was asked for
    resized: LoopTime = field(default_factory=LoopTime)  # what it cost to run such batches by schedules for others


@dataclass(slots=True, eq=False)
class KnownCell:
    """What is known of a cell: who reads it, and what was made of it."""

    reader: StepReader = field(default_factory=StepReader)
    made: OrderedDict[tuple[Hashable, int], KnownStep] = field(default_factory=OrderedDict)
    loops: OrderedDict[Hashable, LoopTime] = field(default_factory=OrderedDict)  # by kind of call, in the plain loop
    told: str = "step by step, until that has cost as much as the making of a schedule"  # what was decided, and when

    def loop_time(self, kind: Hashable) -> LoopTime:
        """Return what calls of one kind have cost in the plain loop."""
        with _lock:
            found = self.loops.get(kind)
            if found is None:
                found = self.loops[kind] = LoopTime()
            self.loops.move_to_end(kind)
            while len(self.loops) > _MOST:
                self.loops.popitem(last=False)
            return found


# Never in the module itself, which would no longer be pickled.
_cells: WeakKeyDictionary[nn.Module, KnownCell] = WeakKeyDictionary()
_lock = threading.Lock()


def cell_known(module: nn.Module) -> KnownCell:
    """Return what is known of a cell."""
    with _lock:
        found = _cells.get(module)
        if found is None:
            found = _cells[module] = KnownCell()
        return found


def known_for(cell: KnownCell, run: Run) -> KnownStep:
    """Return what is known of a run's step under the run's conditions."""
    key = (family_of(run), run.x.shape[0])
    with _lock:
        if key not in cell.made:
            cell.made[key] = KnownStep(run.x.shape[0])
        cell.made.move_to_end(key)
        while len(cell.made) > _MOST:
            cell.made.popitem(last=False)
        return cell.made[key]


def relatives(cell: KnownCell, run: Run) -> list[KnownStep]:
    """Return the steps that have a schedule, and differ from a run's by the number of rows alone."""
    family = family_of(run)
    with _lock:
        return [known for key, known in cell.made.items() if key[0] == family and known.schedule is not None]


def settle(known: KnownStep, run: Run, *, timed: bool, paces: Paces | None = None) -> Schedule:
    """Return the schedule, made now where there is none, or raise why there is none; `timed`, with a decision.

    `paces` measures what the cell stands for, and its schedule where that is used; else the cell itself is measured.
    """
    with known.lock:
        if known.refusal is not None:
            raise known.refusal
        judge = None
        if known.schedule is None:
            try:
                schedule, judge = build(run)
            except Untraceable as refusal:
                known.refusal = refusal.with_traceback(None)
                raise
            compile_loops(schedule, run, judge)
            known.schedule = schedule
        if timed and known.decision is None:
            known.decision = EngineDecision(1, "being tried")  # while `paces` runs by it
            known.decision = _decided(known.schedule, judge, run, paces)
        return known.schedule


def _decided(schedule: Schedule, judge: Judge | None, run: Run, paces: Paces | None) -> EngineDecision:
    try:
        return _decision(schedule, judge or Judge(run, grad=schedule.grad), run, paces)
    except Exception as error:  # what cannot even be tried out is not run
        return EngineDecision(None, f"a trial fails: {type(error).__name__}: {str(error).strip()[:200]}")


def _decision(schedule: Schedule, judge: Judge, run: Run, paces: Paces | None) -> EngineDecision:
    if counted():
        compiled = not schedule.plain_because
        return EngineDecision(2 if compiled else None, "its loops are compiled" if compiled else schedule.plain_because)
    return decide(*judge.paces(schedule, run)) if paces is None else decide(*paces(), _WIN)


def known_to(module: nn.Module) -> int:
    """Return how many schedules are kept for a cell."""
    with _lock:
        return len(_cells[module].made) if module in _cells else 0


def kind_of(x: Tensor) -> Hashable:
    """Return what calls have in common that may run by one schedule, as far as the input tells."""
    return (x.shape[2:], x.dtype, x.device, torch.is_grad_enabled())


def family_of(run: Run) -> Hashable:
    """Return all that a schedule depends on, but for the number of rows."""
    step, device, reading = run.step, run.x.device.type, run.step.reading
    grad, axes = run.needs_grad(), tuple(step.axes.values())
    # Where some rows end, what their first step was given stands behind what a reset leads back to.
    rowed = [(run.x[:, 0], 0), *zip(run.firsts, axes * 2, strict=False), *zip(run.states, axes, strict=True)]
    return (
        kind_of(run.x),
        (reading.graph, reading.fluid),
        tuple((type(number), repr(number)) for number in reading.constants()),  # 0.0 and -0.0 are equal
        step.layer.adapter,
        (step.ends, step.restarts, grad, tuple(step.axes.items())),
        tuple(_kind(tensor, grad) for tensor in run.weights),
        tuple(_kind(tensor, grad, axis) for tensor, axis in rowed),
        (torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)),
        (torch.get_float32_matmul_precision(), is_exact()),
    )


def _kind(tensor: Tensor, grad: bool, rows: int | None = None) -> tuple[Hashable, ...]:
    shape = tuple(size for axis, size in enumerate(tensor.shape) if axis != rows)
    return (shape, tensor.dtype, tensor.device, grad and tensor.requires_grad)
