"""The fast engine: a cell run by the schedule of its trace, forward and backward."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ..cells import Layer, random_streams_kept
from ..errors import Untraceable
from ..state import State
from .capture import Pass
from .checks import Task
from .draws import draw_all
from .reading import StepReader
from .schedule import Bound, Schedule
from .step import Step, StepArguments


@dataclass(frozen=True, slots=True, eq=False)
class Run:
    """One call of the fast engine: the tensors that go in, and where rows end or start anew."""

    step: Step
    task: Task
    weights: list[Tensor]
    firsts: list[Tensor]
    x: Tensor  # (batch, time, ...)
    masks: list[Tensor]  # alive (time, batch), then anew (time, batch), as far as asked for; random numbers (time, ...)
    states: list[Tensor]
    drawn: int = 0  # how many of the masks are random numbers
    stream: Tensor | None = None  # the random stream before they were drawn

    @property
    def tensors(self) -> list[Tensor]:
        """All that may have a gradient."""
        return [*self.weights, *self.firsts, self.x, *self.states]

    @property
    def lengths(self) -> set[int]:
        """The numbers of steps that rows have."""
        return {self.x.shape[1]} if self.task.lengths is None else set(self.task.lengths.tolist())

    def arguments(self, t: int, states: Sequence[Tensor]) -> StepArguments:
        """Return what one step is given, as tensors that lead nowhere; how they lie in memory is another at each."""
        inputs = [self.x[:, t].contiguous(), *(mask[t] for mask in self.masks)]
        groups = (self.weights, self.firsts, inputs, [part.contiguous() for part in states])
        return StepArguments(*([t.detach().requires_grad_(t.requires_grad) for t in group] for group in groups))

    def needs_grad(self) -> bool:
        """Say whether a backward pass may follow."""
        return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in self.tensors)


def prepare(layer: Layer, task: Task, reader: StepReader) -> Run:
    """Lay out a task for the fast engine: read what the cell does now, and with which tensors."""
    resets = task.resets
    if resets is not None and task.lengths is not None:
        resets = resets & (
            torch.arange(task.x.shape[1], device="cpu") < task.lengths[:, None]
        )  # what has ended does not start again
        resets = resets if bool(resets.any()) else None
    state = (task.initial or layer.initial)(task.x.shape[0]) if task.state is None else task.state
    step = Step(layer, dict(state.batch_axis), ends=task.lengths is not None, restarts=resets is not None)
    step.read(reader, task.x[:, 0], list(state.values()))
    run = lay_out(step, replace(task, state=state, resets=resets))
    if not torch.is_inference_mode_enabled() and any(tensor.is_inference() for tensor in run.tensors):
        raise Untraceable("a tensor that it reads was made in inference mode, and torch keeps none for a backward pass")
    return run


def lay_out(step: Step, task: Task) -> Run:
    """Return the tensors that go into a run of a step that was read."""
    assert task.state is not None
    (batch, steps), masks, x, states = task.x.shape[:2], [], task.x, list(task.state.values())
    firsts = list((task.initial or step.layer.initial)(batch).values()) if task.resets is not None else []
    if task.lengths is not None:
        masks.append((torch.arange(steps, device="cpu")[:, None] < task.lengths).to(x.device))
        x = _hold_first(x, task.lengths)
        firsts += _at_first(task, step, states, firsts)
    if task.resets is not None:
        masks.append(task.resets.T.contiguous().to(x.device))
    return Run(step, task, step.reading.weights, firsts, x, masks, states)


def _at_first(task: Task, step: Step, states: list[Tensor], firsts: list[Tensor]) -> list[Tensor]:
    """Return the state that each row goes into its first step with."""
    if task.resets is None:
        return [part.detach() for part in states]
    anew = task.resets[:, 0]
    found = []
    for part, first, axis in zip(states, firsts, step.axes.values(), strict=True):
        mask = anew.to(part.device).view([-1 if place == axis else 1 for place in range(part.dim())])
        found.append(torch.where(mask, first.detach().to(part.dtype), part.detach()))
    return found


def execute(schedule: Schedule, run: Run) -> tuple[Tensor, State]:
    """Run a schedule."""
    draws = schedule.trace.draws
    stream = torch.get_rng_state() if draws and schedule.grad else None
    drawn = draw_all(draws, run.x, run.task.lengths)
    run = replace(run, masks=[*run.masks, *drawn], drawn=len(drawn), stream=stream) if draws else run
    if schedule.grad:
        out, *finals = _Unrolled.apply(schedule, run, *run.tensors)  # type: ignore[no-untyped-call]
    else:
        out, finals, _ = _forward(schedule, run, run.tensors)
    return out, State(dict(zip(run.step.axes, finals, strict=True)), run.step.axes)


def plain(run: Run, tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return what a schedule returns, step by step: the oracle, and the way to second derivatives."""
    w, f = len(run.weights), len(run.firsts)
    weights, firsts, x, states = tensors[:w], tensors[w : w + f], tensors[w + f], list(tensors[w + f + 1 :])
    if run.drawn and (run.task.lengths is not None or x.is_cuda):
        raise Untraceable("what was drawn cannot be drawn again: for such derivatives engine='loop' is needed")
    outputs, masks = [], run.masks[: len(run.masks) - run.drawn]
    with random_streams_kept() if run.drawn else nullcontext():
        if run.stream is not None:
            torch.set_rng_state(run.stream)
        for t, now in enumerate(x.unbind(1)):
            out, *states = run.step(weights, firsts, [now, *(mask[t] for mask in masks)], states)
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
        # What the user gets is nobody else's: it may be written to.
        used = {tensor.untyped_storage().data_ptr() for tensor in (*given, *saved)}
        out = bound.along(schedule.trace.out)
        out = _own(out, used).transpose(0, 1) if schedule.steps_first else _own(out.transpose(0, 1), used)
        used.add(out.untyped_storage().data_ptr())
        return [out, *(_own(part, used) for part in finals), *saved]

    fixed, along = schedule.saved() if schedule.grad else ([], [])
    return forward


def _own(tensor: Tensor, used: set[int]) -> Tensor:
    """Return a tensor without gaps in memory that is not in use."""
    if tensor.untyped_storage().data_ptr() in used:
        return tensor.clone(memory_format=torch.contiguous_format)
    return tensor.contiguous()


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
        # Beside what went in, its numbers as they are now: `weight.data = other` takes them from under a tensor unseen.
        ctx.save_for_backward(*tensors, *(tensor.detach() for tensor in tensors), *saved)
        ctx.set_materialize_grads(False)
        ctx.outputs = [(value.shape, value.dtype) for value in (out, *finals)]
        ctx.mark_non_differentiable(*(value for n, value in enumerate((out, *finals)) if not _leads(schedule, run, n)))
        return (out, *finals)

    @staticmethod
    def backward(ctx: Any, *given: Tensor | None) -> tuple[Any, ...]:
        schedule, run, count = ctx.schedule, ctx.run, ctx.count
        kept = ctx.saved_tensors  # asked for once: whoever keeps them may give them only once
        tensors, now, saved = kept[:count], kept[count : 2 * count], kept[2 * count :]
        reached = schedule.reaching(run.lengths, [grad is not None for grad in given])
        wanted = [has and asked for has, asked in zip(reached, ctx.needs_input_grad[2:], strict=True)]
        if torch.is_grad_enabled():
            return (None, None, *_differentiable(run, tensors, given, wanted))
        if _many_at_once(given):
            with torch.enable_grad():
                leaves = [value.detach().requires_grad_(needed) for value, needed in zip(now, wanted, strict=True)]
                return (None, None, *_differentiable(run, leaves, given, wanted, again=False))
        grads = [
            torch.zeros(shape, dtype=dtype, device=run.x.device) if grad is None else grad
            for grad, (shape, dtype) in zip(given, ctx.outputs, strict=True)
        ]
        inputs, steps = [*now, *run.masks, *saved, *grads], run.x.shape[1]
        with _exactly(run.x.device.type):
            if schedule.captures is None:
                found = backward_pass(schedule, count, len(run.masks))(inputs)
            else:
                found = schedule.captures[1](steps, inputs)
        waiting = iter(found)
        made = [next(waiting) if has else None for has in _made(schedule)]
        return (None, None, *(grad if needed else None for grad, needed in zip(made, wanted, strict=True)))


def _leads(schedule: Schedule, run: Run, place: int) -> bool:
    """Say whether one of the results depends on anything that requires a gradient."""
    reached = schedule.reaching(run.lengths, [place == other for other in range(1 + len(run.states))])
    return any(has and tensor.requires_grad for has, tensor in zip(reached, run.tensors, strict=True))


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
    to_x = None if trace.to_x is None else bound.along(trace.to_x).transpose(0, 1).contiguous()
    return [*to_weights, to_x, *to_states]


def _many_at_once(grads: Sequence[Tensor | None]) -> bool:
    """Say whether many gradients come as one, as for a whole Jacobian."""
    flags: Any = torch._C._functorch
    return any(g is not None and (flags.is_batchedtensor(g) or flags.is_legacy_batchedtensor(g)) for g in grads)


def _differentiable(
    run: Run, tensors: Sequence[Tensor], grads: Sequence[Tensor | None], wanted: Sequence[bool], *, again: bool = True
) -> list[Tensor | None]:
    """Return gradients by way of the plain loop, which can be differentiated again."""
    outputs = plain(run, tensors)
    pairs = [(out, grad) for out, grad in zip(outputs, grads, strict=True) if out.requires_grad and grad is not None]
    asked = [tensor for tensor, needed in zip(tensors, wanted, strict=True) if needed]
    roots, seeds = [out for out, _ in pairs], [grad for _, grad in pairs]
    waiting = iter(torch.autograd.grad(roots, asked, seeds, create_graph=again, allow_unused=True))
    return [next(waiting) if needed else None for needed in wanted]


def _exactly(device: str) -> Any:
    # The trace has every cast of autocast in it already.
    return torch.autocast(device, enabled=False)


def _hold_first(x: Tensor, lengths: Tensor) -> Tensor:
    """Return x with each row's first step in place of its padding, so that no step meets foreign numbers."""
    batch, steps = x.shape[:2]
    time = torch.arange(steps, device="cpu")
    place = torch.where(time < lengths[:, None], time, 0) + steps * torch.arange(batch, device="cpu")[:, None]
    return x.flatten(0, 1).index_select(0, place.flatten().to(x.device)).view(x.shape)
