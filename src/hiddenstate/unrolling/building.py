"""From a run to its schedule: traced, split, checked against the plain loop, and compiled where that pays."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..errors import Untraceable
from .capture import Captures
from .fast import Run, backward_pass, execute, forward_pass, plain
from .native import CompiledRunner, Unsupported
from .onchip import OnChipRunner
from .scan import Loop, PythonRunner, Runner
from .schedule import Schedule
from .split import split
from .tracing import trace

_TRIAL = 3  # steps on which a new schedule has to agree with the plain loop
_TOLERANCE = {torch.bfloat16: 0.1, torch.float16: 0.03, torch.float32: 1e-3, torch.float64: 1e-8}  # coarsest first


def build(run: Run) -> Schedule:
    """Return a schedule for runs like this one, or raise why there is none."""
    states = [part.detach() for part in run.states]
    if any(tensor.is_complex() or tensor.layout is not torch.strided for tensor in run.tensors):
        raise Untraceable("it works with complex or sparse tensors")
    traced = trace(run.step, run.arguments(0, states), grad=run.needs_grad())
    wide = is_wide(run)
    try:
        schedule = Schedule(split(traced, wide=wide), wide=wide)
        _try_out(schedule, run)
    except Untraceable:
        raise
    except Exception as error:  # whatever a schedule meets, the loop is still there
        raise Untraceable(f"its schedule fails: {type(error).__name__}: {str(error).strip()[:200]}") from error
    return schedule


def is_wide(run: Run) -> bool:
    """Say whether light work is taken out of the loop too: where launching an operation costs more than its data."""
    return run.x.device.type != "cpu"


def compile_loops(schedule: Schedule, run: Run) -> None:
    """Have a schedule's loops run by compiled code, where there is a compiler and the code can be written."""
    kind = run.x.device.type
    if kind not in ("cpu", "cuda"):
        return
    steps = _TRIAL if kind == "cpu" else run.x.shape[1]  # what is recorded on a GPU is recorded for a number of steps
    trial = _trial(schedule, run, steps)
    before = _results(schedule, trial)
    try:
        if kind == "cuda":
            _compile_for_cuda(schedule, run)
        else:
            schedule.use([CompiledRunner(loop) for loop in schedule.loops()])
        _agree(_results(schedule, trial), before, _tolerance(schedule))
    except (Unsupported, Untraceable, RuntimeError) as error:
        schedule.go_plain(str(error))


def _compile_for_cuda(schedule: Schedule, run: Run) -> None:
    """Fuse the body of each loop and the work around it, and record each pass as one graph of kernels."""
    count, masks = len(run.tensors), len(run.masks)
    fuses = importlib.util.find_spec("triton") is not None
    schedule.use([_cuda_runner(loop, run.x.device, fuses) for loop in schedule.loops()])
    for sweep in schedule.sweeps():
        sweep.compiled = fuses
    forward = Captures(lambda steps: forward_pass(schedule, count))
    backward = Captures(lambda steps: backward_pass(schedule, count, masks))
    schedule.captures = (forward, backward)


def _cuda_runner(loop: Loop, device: torch.device, fuses: bool) -> Runner:
    """Run a loop as one kernel, or else step by step with its body fused."""
    try:
        return OnChipRunner(loop, device, exact=torch.get_float32_matmul_precision() == "highest")
    except Unsupported:
        # Compiled from its graph: no shape of it depends on the number of steps.
        return PythonRunner(loop, _fused(loop) if fuses else None)


def _try_out(schedule: Schedule, run: Run) -> None:
    """Refuse a schedule that gives other numbers than the plain loop: no cell is worth a wrong answer."""
    trial = _trial(schedule, run, _TRIAL)
    _agree(_results(schedule, trial), _results(None, trial), _tolerance(schedule))


def _fused(loop: Loop) -> Callable[..., Any]:
    fused: Callable[..., Any] = torch.compile(loop.body.call, dynamic=False, fullgraph=True)
    return fused


def _trial(schedule: Schedule, run: Run, steps: int) -> Run:
    """Return the first steps of a run, with tensors that lead nowhere."""
    leaves = [tensor.detach()[:, :steps] if tensor is run.x else tensor.detach() for tensor in run.tensors]
    for leaf, tensor in zip(leaves, run.tensors, strict=True):
        leaf.requires_grad_(schedule.grad and tensor.requires_grad)
    w, f = len(run.weights), len(run.firsts)
    masks = [mask[:steps] for mask in run.masks]
    return Run(run.step, leaves[:w], leaves[w : w + f], leaves[w + f], masks, leaves[w + f + 1 :])


def _results(schedule: Schedule | None, trial: Run) -> list[Tensor]:
    """Return values and all gradients, by a schedule or by the plain loop."""
    asked = [leaf for leaf in trial.tensors if leaf.requires_grad]
    with torch.set_grad_enabled(bool(asked)):
        if schedule is None:
            values = plain(trial, trial.tensors)
        else:
            out, final = execute(schedule, trial)
            values = [out, *final.values()]
        if trial.x.shape[1] > _TRIAL:
            values = [values[0][:, :_TRIAL]]  # beyond, rounding alone may lead far apart
        roots = [value.float().cos().sum() for value in values if value.requires_grad]
    found = torch.autograd.grad(roots, asked, allow_unused=True) if roots else []
    pairs = zip(asked, found, strict=True) if roots else []
    grads = [torch.zeros_like(leaf) if grad is None else grad for leaf, grad in pairs]
    return [value.detach() for value in (*values, *grads)]


def _agree(ours: list[Tensor], theirs: list[Tensor], tolerance: float) -> None:
    for one, other in zip(ours, theirs, strict=True):
        if one.shape != other.shape or one.dtype != other.dtype:
            kinds = f"{one.dtype} {tuple(one.shape)}, not {other.dtype} {tuple(other.shape)}"
            raise Untraceable(f"its schedule gives {kinds}")
        if not one.is_floating_point():
            same = torch.equal(one, other)
        else:
            # NaN and infinity may be right; they have to be in the same places.
            finite = torch.isfinite(other)
            same = torch.equal(one[~finite].nan_to_num(0, 1, -1), other[~finite].nan_to_num(0, 1, -1))
            away = (one[finite].double() - other[finite].double()).norm()
            same = same and bool(away <= tolerance * (other[finite].double().norm() + 1e-6))
        if not same:
            raise Untraceable("its schedule gives other numbers than the plain loop")


def _tolerance(schedule: Schedule) -> float:
    """Return what rounding may make of a few steps, by the coarsest dtype that takes part in them."""
    values = [node.meta.get("val") for node in schedule.trace.graph.nodes]
    present = {value.dtype for value in values if isinstance(value, Tensor)}
    on_gpu = any(isinstance(value, Tensor) and value.is_cuda for value in values)
    coarsest = next((dtype for dtype in _TOLERANCE if dtype in present), torch.float32)
    # Matrix units round the factors of float32 products to ten bits where torch allows them to.
    return max(_TOLERANCE[coarsest], 0.02 if on_gpu and coarsest is torch.float32 else 0.0)
