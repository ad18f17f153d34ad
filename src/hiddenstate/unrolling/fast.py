"""The fast engine: a cell run by the schedule of its trace, forward and backward."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..cells import Layer
from ..state import State
from .capture import Pass
from .checks import Task
from .schedule import Bound, Schedule
from .step import Arguments, Step


@dataclass(frozen=True, slots=True, eq=False)
class Run:
    """One call of the fast engine: the tensors that go in, and where rows end or start anew."""

    step: Step
    weights: list[Tensor]
    firsts: list[Tensor]
    x: Tensor  # (batch, time, ...)
    masks: list[Tensor]  # alive (time, batch), then anew (time, batch), as far as asked for
    states: list[Tensor]

    @property
    def tensors(self) -> list[Tensor]:
        """All that may have a gradient."""
        return [*self.weights, *self.firsts, self.x, *self.states]

    def arguments(self, t: int, states: Sequence[Tensor]) -> Arguments:
        """Return what one step is given, as tensors that lead nowhere."""
        inputs = [self.x[:, t], *(mask[t] for mask in self.masks)]
        groups = (self.weights, self.firsts, inputs, states)
        return Arguments(*([t.detach().requires_grad_(t.requires_grad) for t in group] for group in groups))

    def needs_grad(self) -> bool:
        """Say whether a backward pass may follow."""
        return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in self.tensors)


def prepare(layer: Layer, task: Task) -> Run:
    """Lay out a task for the fast engine."""
    batch, steps = task.x.shape[:2]
    start = task.initial or layer.initial
    state = start(batch) if task.state is None else task.state
    firsts = list(start(batch).values()) if task.resets is not None else []
    step = Step(layer, dict(state.batch_axis), ends=task.lengths is not None, restarts=task.resets is not None)
    masks, x = [], task.x
    if task.lengths is not None:
        masks.append((torch.arange(steps)[:, None] < task.lengths).to(x.device))
        x = _hold_last(x, task.lengths)
    if task.resets is not None:
        anew = task.resets.T if task.lengths is None else task.resets.T & (torch.arange(steps)[:, None] < task.lengths)
        masks.append(anew.contiguous().to(x.device))  # a row that has ended does not start again
    return Run(step, step.weights(), firsts, x, masks, list(state.values()))


def execute(schedule: Schedule, run: Run) -> tuple[Tensor, State]:
    """Run a schedule."""
    if schedule.grad:
        out, *finals = _Unrolled.apply(schedule, run, *run.tensors)  # type: ignore[no-untyped-call]
    else:
        out, finals, _ = _forward(schedule, run, run.tensors)
    return out, State(dict(zip(run.step.axes, finals, strict=True)), run.step.axes)


def plain(run: Run, tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return what a schedule returns, step by step: the oracle, and the way to second derivatives."""
    w, f = len(run.weights), len(run.firsts)
    weights, firsts, x, states = tensors[:w], tensors[w : w + f], tensors[w + f], list(tensors[w + f + 1 :])
    outputs = []
    for t, now in enumerate(x.unbind(1)):
        out, *states = run.step(weights, firsts, [now, *(mask[t] for mask in run.masks)], states)
        outputs.append(out)
    return [torch.stack(outputs, 1), *states]


def _forward(schedule: Schedule, run: Run, tensors: Sequence[Tensor]) -> tuple[Tensor, list[Tensor], list[Tensor]]:
    """Return outputs, final states, and what the backward pass needs."""
    given, steps = [*tensors, *run.masks], run.x.shape[1]
    with torch.no_grad(), _exactly(run.x.device.type):
        if schedule.captures is None:
            results = forward_pass(schedule, len(tensors))(given)
        else:
            results = schedule.captures[0](steps, given)
    count = 1 + len(run.states)
    return results[0], results[1:count], results[count:]


def forward_pass(schedule: Schedule, count: int, *, fused: bool = False) -> Pass:
    """Return the forward pass as a function of flat tensors, `count` of which may have a gradient."""

    def forward(given: list[Tensor]) -> list[Tensor]:
        bound = _bind(schedule, given[:count], given[count:], fused)
        states = given[count - len(schedule.trace.states) : count]
        finals = schedule.forward(bound, states)
        saved = [*map(bound.fixed, fixed), *map(bound.along, along)]
        return [bound.along(schedule.trace.out).transpose(0, 1), *finals, *saved]

    fixed, along = schedule.saved() if schedule.grad else ([], [])
    return forward


def backward_pass(schedule: Schedule, count: int, masks: int, *, fused: bool = False) -> Pass:
    """Return the backward pass as a function of flat tensors: those given, masks, what was saved, and gradients."""
    fixed, along = schedule.saved()

    def backward(given: list[Tensor]) -> list[Tensor]:
        bound = _bind(schedule, given[:count], given[count : count + masks], fused)
        saved, grads = given[count + masks :], given[count + masks + len(fixed) + len(along) :]
        bound.same.update(zip(fixed, saved, strict=False))
        bound.varying.update(zip(along, saved[len(fixed) :], strict=False))
        return [grad for grad in _backward(schedule, bound, grads) if grad is not None]

    return backward


def _bind(schedule: Schedule, tensors: Sequence[Tensor], masks: Sequence[Tensor], fused: bool) -> Bound:
    trace = schedule.trace
    constant = len(trace.weights) + len(trace.firsts)
    x = tensors[constant]
    bound = Bound(x.shape[1], fused)
    now = x.transpose(0, 1)  # (time, batch, ...)
    if x.is_cuda:
        now = now.contiguous()  # else a product with a weight falls apart into one for each step
    bound.same.update(trace.constants)
    bound.same.update(zip([*trace.weights, *trace.firsts], tensors, strict=False))
    bound.varying.update(zip(trace.inputs, [now, *masks], strict=True))
    return bound


class _Unrolled(torch.autograd.Function):
    """A schedule with its backward pass."""

    @staticmethod
    def forward(ctx: Any, schedule: Schedule, run: Run, *tensors: Tensor) -> tuple[Tensor, ...]:
        out, finals, saved = _forward(schedule, run, tensors)
        ctx.schedule, ctx.run, ctx.count = schedule, run, len(tensors)
        ctx.save_for_backward(*tensors, *saved)
        ctx.mark_non_differentiable(*(part for part in finals if not part.is_floating_point()))
        return (out, *finals)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        schedule, run, count = ctx.schedule, ctx.run, ctx.count
        tensors, saved = ctx.saved_tensors[:count], ctx.saved_tensors[count:]
        if torch.is_grad_enabled():
            return (None, None, *_differentiable(ctx, tensors, grads))
        given, steps = [*tensors, *run.masks, *saved, *grads], run.x.shape[1]
        with _exactly(run.x.device.type):
            if schedule.captures is None:
                found = backward_pass(schedule, count, len(run.masks))(given)
            else:
                found = schedule.captures[1](steps, given)
        waiting = iter(found)
        made = [next(waiting) if has else None for has in _made(schedule)]
        wanted = ctx.needs_input_grad[2:]
        return (None, None, *(grad if needed else None for grad, needed in zip(made, wanted, strict=True)))


def _made(schedule: Schedule) -> list[bool]:
    """Say for each tensor that went in whether the backward pass makes a gradient for it."""
    trace = schedule.trace
    floats = [node.meta["val"].is_floating_point() for node in trace.states]
    return [*(node is not None for node in (*trace.to_weights, *trace.to_firsts, trace.to_x)), *floats]


def _backward(schedule: Schedule, bound: Bound, grads: Sequence[Tensor]) -> list[Tensor | None]:
    trace = schedule.trace
    if trace.grad_out is not None:
        bound.varying[trace.grad_out] = grads[0].transpose(0, 1)
    floats = [node.meta["val"].is_floating_point() for node in trace.states]
    first = iter(schedule.backward(bound, [grad for grad, has in zip(grads[1:], floats, strict=True) if has]))
    to_states = [next(first) if has else None for has in floats]
    weights, firsts = schedule.sums()
    to_weights = [None if total is None else total(bound) for total in (*weights, *firsts)]
    to_x = None if trace.to_x is None else bound.along(trace.to_x).transpose(0, 1)
    return [*to_weights, to_x, *to_states]


def _differentiable(ctx: Any, tensors: Sequence[Tensor], grads: Sequence[Tensor]) -> list[Tensor | None]:
    """Return gradients that can be differentiated again, by way of the plain loop."""
    outputs = plain(ctx.run, tensors)
    pairs = [(out, grad) for out, grad in zip(outputs, grads, strict=True) if out.requires_grad]
    wanted = [tensor for tensor, needed in zip(tensors, ctx.needs_input_grad[2:], strict=True) if needed]
    found = torch.autograd.grad(
        [out for out, _ in pairs], wanted, [grad for _, grad in pairs], create_graph=True, allow_unused=True
    )
    waiting = iter(found)
    return [next(waiting) if needed else None for needed in ctx.needs_input_grad[2:]]


def _exactly(device: str) -> Any:
    # The trace has every cast of autocast in it already.
    return torch.autocast(device, enabled=False)


def _hold_last(x: Tensor, lengths: Tensor) -> Tensor:
    """Return x with each row's last valid step in place of its padding, so that no step meets foreign numbers."""
    batch, steps = x.shape[:2]
    place = torch.minimum(torch.arange(steps), lengths[:, None] - 1) + steps * torch.arange(batch)[:, None]
    return x.flatten(0, 1).index_select(0, place.flatten().clamp(min=0).to(x.device)).view(x.shape)
