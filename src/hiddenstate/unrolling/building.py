"""Building a schedule: a step is traced, split, checked against the plain loop, and compiled if that pays off."""

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Callable
from typing import Any

import torch

from ..errors import Untraceable
from .capture import Captures, Pass
from .fast import Run, backward_pass, forward_pass
from .judging import Judge, agree, tolerance_of
from .native import CompiledRunner, Unsupported
from .precision import is_exact
from .reading import unlogged
from .scan import Loop, PythonRunner, Runner
from .schedule import Schedule
from .split import split
from .tracing import trace


def build(run: Run) -> tuple[Schedule, Judge]:
    """Return a schedule for runs like this one with its judge, or raise why there is none."""
    if any(tensor.is_complex() or tensor.layout is not torch.strided for tensor in run.tensors):
        raise Untraceable("it works with complex or sparse tensors")
    wide = is_wide(run)
    try:
        traced = trace(run.step, run.arguments(0, [part.detach() for part in run.states]), grad=run.needs_grad())
        schedule = Schedule(split(traced, wide=wide), wide=wide, ends=run.step.ends)
        schedule.steps_first = run.step.layer.adapter.steps_first
        judge = Judge(run, grad=schedule.grad)
        judge.check(schedule)
    except Untraceable:
        raise
    except Exception as error:  # whatever a schedule meets, the loop is still there
        raise Untraceable(f"its schedule fails: {_said(error)}") from error
    return schedule, judge


def is_wide(run: Run) -> bool:
    """Say whether light work is taken out of the loop too: where launching an operation costs more than its data."""
    return run.x.device.type != "cpu"


def compile_loops(schedule: Schedule, run: Run, judge: Judge | None = None) -> None:
    """Have a schedule's loops run by compiled code, where there is a compiler and the code can be written."""
    ways = {"cpu": [_compile_to_c], "cuda": [_compile_on_chip, _compile_bodies]}.get(run.x.device.type, [])
    for way in ways:
        try:
            with warnings.catch_warnings(), unlogged():
                warnings.simplefilter("ignore")  # of what torch's compiler thinks of the user's settings
                judge = judge or Judge(run, grad=schedule.grad)
                plainly = judge.at_edges(schedule)
                runs = way(schedule, run)
                judge.check(schedule)
                for ours, theirs in zip(judge.at_edges(schedule), plainly, strict=True):
                    agree(ours, theirs, judge.tolerance)
                if run.x.is_cuda:
                    _record(schedule, run)
        except Exception as error:  # whatever a writer or a compiler meets, torch's own operations are still there
            schedule.go_plain(str(error) if isinstance(error, Unsupported | Untraceable) else _said(error))
        else:
            schedule.runs, schedule.plain_because = runs, ""
            return


def _said(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip()[:200]}"


def _compile_to_c(schedule: Schedule, run: Run) -> str:
    schedule.use([CompiledRunner(loop) for loop in schedule.loops()])
    return "its loops are compiled to C"


def _compile_on_chip(schedule: Schedule, run: Run) -> str:
    """Have each loop run as one kernel that holds its weights, or where that cannot be its body as few kernels."""
    from .onchip import OnChipRunner  # only here: most who import us have no GPU

    runners: list[Runner] = []
    reasons = []
    for loop in schedule.loops():
        try:
            runners.append(OnChipRunner(loop, run.x.device, exact=is_exact()))
        except Unsupported as reason:
            reasons.append(str(reason))
            runners.append(PythonRunner(loop, _fused(loop)))
    if len(reasons) == len(runners):
        raise Unsupported(reasons[0])
    schedule.use(runners)
    kept = f", but for one: {reasons[0]}" if reasons else ""
    return f"its loops are one CUDA kernel each, which keeps the weights on the chip{kept}"


def _compile_bodies(schedule: Schedule, run: Run) -> str:
    """Have the body of each loop fused."""
    # Compiled from their graphs: no shape of theirs depends on the number of steps.
    schedule.use([PythonRunner(loop, _fused(loop)) for loop in schedule.loops()])
    return f"the bodies of its loops are fused, since {schedule.plain_because}"


def _record(schedule: Schedule, run: Run) -> None:
    """Have each pass recorded as one CUDA graph where its length comes back."""
    count, masks, tolerance = len(run.tensors), len(schedule.trace.inputs) - 1, 5 * tolerance_of(run)

    def captures(make: Callable[..., Pass], *sizes: int) -> Captures:
        plainly, fused = make(schedule, *sizes), make(schedule, *sizes, fused=_fuses())
        return Captures(plainly, fused, lambda ours, theirs: agree(ours, theirs, tolerance))

    forward = captures(forward_pass, count)
    schedule.captures = forward, captures(backward_pass, count, masks) if schedule.grad else forward


def _fuses() -> bool:
    return importlib.util.find_spec("triton") is not None


def _fused(loop: Loop) -> Callable[..., Any] | None:
    return torch.compile(loop.body.call, dynamic=False) if _fuses() else None
