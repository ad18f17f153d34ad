"""From a run to its schedule: traced, split, checked against the plain loop, and compiled where that pays."""

from __future__ import annotations

import torch
from torch import Tensor

from ..errors import Untraceable
from .fast import Run, execute, plain
from .native import CompiledRunner, Unsupported
from .schedule import Schedule
from .split import split
from .tracing import trace

_TRIAL = 3  # steps on which a new schedule has to agree with the plain loop
_TOLERANCE = {torch.bfloat16: 0.1, torch.float16: 0.03, torch.float32: 1e-3, torch.float64: 1e-7}  # coarsest first


def build(run: Run) -> Schedule:
    """Return a schedule for runs like this one, or raise why there is none."""
    states = [part.detach() for part in run.states]
    traced = trace(run.step, run.arguments(0, states), grad=run.needs_grad())
    wide = is_wide(run)
    schedule = Schedule(split(traced, wide=wide), wide=wide)
    _try_out(schedule, run)
    return schedule


def is_wide(run: Run) -> bool:
    """Say whether light work is taken out of the loop too: where launching an operation costs more than its data."""
    return run.x.device.type != "cpu"


def compile_loops(schedule: Schedule, run: Run) -> None:
    """Have a schedule's loops run by compiled code, where there is a compiler and the code can be written."""
    if run.x.device.type != "cpu":
        return
    try:
        schedule.use([CompiledRunner(loop) for loop in schedule.loops()])
    except Unsupported as error:
        schedule.plain_because = str(error)
        return
    _try_out(schedule, run)


def _try_out(schedule: Schedule, run: Run) -> None:
    """Refuse a schedule that gives other numbers than the plain loop: no cell is worth a wrong answer."""
    grad = schedule.grad
    leaves = [tensor.detach()[:, :_TRIAL] if tensor is run.x else tensor.detach() for tensor in run.tensors]
    masks = [mask[:_TRIAL] for mask in run.masks]
    for leaf, tensor in zip(leaves, run.tensors, strict=True):
        leaf.requires_grad_(grad and tensor.requires_grad)
    w, f = len(run.weights), len(run.firsts)
    trial = Run(run.step, leaves[:w], leaves[w : w + f], leaves[w + f], masks, leaves[w + f + 1 :])
    with torch.set_grad_enabled(grad):
        out, final = execute(schedule, trial)
        ours, theirs = [out, *final.values()], plain(trial, leaves)
    pairs = list(zip(ours, theirs, strict=True))
    if grad:
        asked = [leaf for leaf in leaves if leaf.requires_grad]
        pairs += zip(_gradients(ours, asked), _gradients(theirs, asked), strict=True)
    tolerance = _tolerance(schedule)
    for one, other in pairs:
        _compare(one.detach(), other.detach(), tolerance)


def _gradients(values: list[Tensor], asked: list[Tensor]) -> list[Tensor]:
    roots = [value for value in values if value.requires_grad]
    found = torch.autograd.grad([value.cos().sum() for value in roots], asked, allow_unused=True)
    return [torch.zeros_like(leaf) if grad is None else grad for leaf, grad in zip(asked, found, strict=True)]


def _tolerance(schedule: Schedule) -> float:
    """Return what rounding may make of a few steps, by the coarsest dtype that takes part in them."""
    values = [node.meta.get("val") for node in schedule.trace.graph.nodes]
    present = {value.dtype for value in values if isinstance(value, Tensor)}
    on_gpu = any(isinstance(value, Tensor) and value.is_cuda for value in values)
    coarsest = next((dtype for dtype in _TOLERANCE if dtype in present), torch.float32)
    # Matrix units round the factors of float32 products to ten bits where torch allows them to.
    return max(_TOLERANCE[coarsest], 0.02 if on_gpu and coarsest is torch.float32 else 0.0)


def _compare(one: Tensor, other: Tensor, tolerance: float) -> None:
    if one.shape != other.shape or one.dtype != other.dtype:
        raise Untraceable(f"its schedule gives {one.dtype} {tuple(one.shape)}, not {other.dtype} {tuple(other.shape)}")
    if not one.is_floating_point():
        if not torch.equal(one, other):
            raise Untraceable("its schedule gives other integers than the plain loop")
        return
    scale = float(other.abs().nan_to_num(0, 0, 0).max()) if other.numel() else 0.0
    if not torch.allclose(one, other, rtol=tolerance, atol=tolerance * (scale + 1e-6), equal_nan=True):
        raise Untraceable("its schedule gives other numbers than the plain loop")
