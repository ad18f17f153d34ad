"""From a run to its schedule: traced, split, checked against the plain loop, and compiled where that pays."""

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..errors import Untraceable
from .capture import Captures, Pass
from .fast import Run, backward_pass, execute, forward_pass, plain
from .native import CompiledRunner, Unsupported
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
    ways = {"cpu": [_compile_to_c], "cuda": [_compile_on_chip, _compile_bodies]}.get(run.x.device.type, [])
    trial = _trial(schedule, run)
    before = _results(schedule, trial) if ways else []
    for way in ways:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of what torch's compiler thinks of the user's settings
                runs = way(schedule, run)
                _agree(_results(schedule, trial), before, _tolerance(schedule))
        except (Unsupported, Untraceable, RuntimeError) as error:
            schedule.go_plain(str(error))
        else:
            schedule.runs, schedule.plain_because = runs, ""
            return


def _compile_to_c(schedule: Schedule, run: Run) -> str:
    schedule.use([CompiledRunner(loop) for loop in schedule.loops()])
    return "its loops are compiled to C"


def _compile_on_chip(schedule: Schedule, run: Run) -> str:
    """Have each loop run as one kernel that holds its weights, or where that cannot be its body as few kernels."""
    from .onchip import OnChipRunner  # only here: most who import us have no GPU

    runners: list[Runner] = []
    reasons = []
    exact = torch.get_float32_matmul_precision() == "highest"
    for loop in schedule.loops():
        try:
            runners.append(OnChipRunner(loop, run.x.device, exact=exact))
        except Unsupported as reason:
            reasons.append(str(reason))
            runners.append(PythonRunner(loop, _fused(loop)))
    if len(reasons) == len(runners):
        raise Unsupported(reasons[0])
    schedule.use(runners)
    _record(schedule, run)
    kept = f", but for one: {reasons[0]}" if reasons else ""
    return f"its loops are one CUDA kernel each, which keeps the weights on the chip{kept}"


def _compile_bodies(schedule: Schedule, run: Run) -> str:
    """Have the body of each loop fused."""
    # Compiled from their graphs: no shape of theirs depends on the number of steps.
    schedule.use([PythonRunner(loop, _fused(loop)) for loop in schedule.loops()])
    _record(schedule, run)
    return f"the bodies of its loops are fused, since {schedule.plain_because}"


def _record(schedule: Schedule, run: Run) -> None:
    """Have each pass recorded as one CUDA graph where its length comes back."""
    count, masks, tolerance = len(run.tensors), len(run.masks), 5 * _tolerance(schedule)

    def captures(make: Callable[..., Pass], *sizes: int) -> Captures:
        plainly, fused = make(schedule, *sizes), make(schedule, *sizes, fused=_fuses())
        return Captures(plainly, fused, lambda ours, theirs: _agree(ours, theirs, tolerance))

    forward = captures(forward_pass, count)
    schedule.captures = forward, captures(backward_pass, count, masks) if schedule.grad else forward


def _fuses() -> bool:
    return importlib.util.find_spec("triton") is not None


def _fused(loop: Loop) -> Callable[..., Any] | None:
    return torch.compile(loop.body.call, dynamic=False) if _fuses() else None


def _try_out(schedule: Schedule, run: Run) -> None:
    """Refuse a schedule that gives other numbers than the plain loop: no cell is worth a wrong answer."""
    trial = _trial(schedule, run)
    _agree(_results(schedule, trial), _results(None, trial), _tolerance(schedule))


def _trial(schedule: Schedule, run: Run) -> Run:
    """Return the first steps of a run, with tensors that lead nowhere."""
    leaves = [tensor.detach()[:, :_TRIAL] if tensor is run.x else tensor.detach() for tensor in run.tensors]
    for leaf, tensor in zip(leaves, run.tensors, strict=True):
        leaf.requires_grad_(schedule.grad and tensor.requires_grad)
    w, f = len(run.weights), len(run.firsts)
    masks = [mask[:_TRIAL] for mask in run.masks]
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
        roots = [value.float().cos().sum() for value in values if value.requires_grad]
    found = torch.autograd.grad(roots, asked, allow_unused=True) if roots else []
    pairs = zip(asked, found, strict=True) if roots else []
    grads = [torch.zeros_like(leaf) if grad is None else grad for leaf, grad in pairs]
    return [value.detach() for value in (*values, *grads)]


def _agree(ours: list[Tensor], theirs: list[Tensor], tolerance: float) -> None:
    # A gradient that is zero but for rounding is judged by the size of the others.
    size = max((_typical(other) for other in theirs), default=0.0)
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
            room = other[finite].double().norm() + 0.01 * size * finite.sum().sqrt() + 1e-6
            same = same and bool(away <= tolerance * room)
        if not same:
            raise Untraceable("its schedule gives other numbers than the plain loop")


def _typical(tensor: Tensor) -> float:
    """Return the size of a tensor's finite numbers: the root of their mean square."""
    if not tensor.is_floating_point():
        return 0.0
    finite = tensor[torch.isfinite(tensor)].double()
    return float(finite.square().mean().sqrt()) if finite.numel() else 0.0


def _tolerance(schedule: Schedule) -> float:
    """Return what rounding may make of a few steps, by the coarsest dtype that takes part in them."""
    values = [node.meta.get("val") for node in schedule.trace.graph.nodes]
    present = {value.dtype for value in values if isinstance(value, Tensor)}
    on_gpu = any(isinstance(value, Tensor) and value.is_cuda for value in values)
    coarsest = next((dtype for dtype in _TOLERANCE if dtype in present), torch.float32)
    # Matrix units round the factors of float32 products to ten bits where torch allows them to.
    return max(_TOLERANCE[coarsest], 0.02 if on_gpu and coarsest is torch.float32 else 0.0)
