"""Checking that a schedule gives the results of the plain loop, on the user's own steps and on harder ones."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from typing import TypeAlias

import torch
from torch import Tensor

from ..cells import Layer, random_streams, random_streams_kept, seed, untouched
from ..errors import Untraceable
from ..state import State
from .checks import Task
from .deciding import Pace, best_of, trial_steps
from .fast import Run, execute, lay_out
from .loop import run_loop
from .schedule import Schedule

_STEPS = 3  # of a trial
_SCALES = (1.0, 4.0)  # by which the numbers of a trial are larger than the user's own
_TOLERANCE = {torch.bfloat16: 0.1, torch.float16: 0.03, torch.float32: 1e-3, torch.float64: 1e-8}  # coarsest first
_EDGES = (math.nan, math.inf, -math.inf, 1e30)  # one number of a row of x, and of a row of the state
_NEAR = 1e-5  # as which steps of the same shape agree, whatever is in their other rows
_ALONE = 30  # times the tolerance, by which a single number may be off
Loss: TypeAlias = Callable[[Tensor], Tensor]
_LOSSES: tuple[Loss, ...] = (  # gradients of their own at each place, or one for all
    lambda value: value.float().cos().sum(),
    lambda value: value.sum(),
)


class Judge:
    """A few short calls of a cell, and what the plain loop makes of them."""

    def __init__(self, run: Run, *, grad: bool) -> None:
        """Run the plain loop on the user's own first and last steps, and on numbers drawn at several scales."""
        self.step, self.grad = run.step, grad
        self.tolerance = tolerance_of(run)
        if run.step.ends and mixes(run):
            raise Untraceable("its rows take part in each other's steps, and some end before others")
        with untouched(run.step.layer.module), _as_asked(grad):
            tried: list[tuple[Task, Loss | None, list[Tensor | None]]] = [
                (task, loss, self._by_loop(task, loss)) for task, loss in self._tasks(run.task)
            ]
            # What overflows may do so a little sooner or later: such a trial says nothing, unless there is no other.
            self._trials = [trial for trial in tried if _finite(trial[2])] or tried[:1]
            self._edges = [self._leaves(_spoiled(tried[0][0], edge), run.task) for edge in _EDGES]
            # Torch itself has several slopes at what is no number, by where in memory it lies; but one value.
            with suppress(Exception):  # where a step fails on it, it says nothing
                self._trials.append((self._edges[0], None, self._by_loop(self._edges[0], None)))

    def check(self, schedule: Schedule) -> None:
        """Refuse a schedule that gives other numbers: no cell is worth a wrong answer."""
        for task, loss, expected in self._trials:
            with _as_asked(self.grad):
                agree(self._by_schedule(schedule, task, loss), expected, self.tolerance)

    def at_edges(self, schedule: Schedule) -> list[list[Tensor | None]]:
        """Return what a schedule makes of numbers that are none, or without end, or almost."""
        with _as_asked(self.grad):
            return [self._by_schedule(schedule, task, _LOSSES[1]) for task in self._edges]

    def paces(self, schedule: Schedule, run: Run) -> tuple[Pace, Pace]:
        """Return how fast the plain loop is on the user's own input, and how fast a schedule is, with its reading."""
        several = trial_steps(run.x.shape[1])
        tasks = [self._leaves(_of_steps(run.task, steps), run.task) for steps in (1, several)]
        with untouched(self.step.layer.module), _as_asked(self.grad):
            loop = [
                best_of(most, partial(self._by_loop, task, _LOSSES[1]))
                for task, most in zip(tasks, (8, 2), strict=True)
            ]
            ours = [best_of(4, partial(self._by_schedule, schedule, task, _LOSSES[1])) for task in tasks]
            reading = best_of(4, self.step.read_again)  # as every call will, to see that nothing has changed
        return Pace(several, *loop), Pace(several, *(seconds + reading for seconds in ours))

    def _tasks(self, task: Task) -> Iterator[tuple[Task, Loss]]:
        batch, steps = task.x.shape[:2]
        places = torch.tensor([0, min(1, steps - 1), steps - 1], device=task.x.device)
        dice = torch.Generator().manual_seed(batch * steps)
        lengths = resets = None
        if task.lengths is not None:  # half of the rows end before the others
            lengths = torch.full((batch,), _STEPS, device="cpu")
            lengths[: (batch + 1) // 2] = _STEPS - 1 - torch.arange((batch + 1) // 2, device="cpu") % (_STEPS - 1)
        if task.resets is not None:
            resets = torch.rand(batch, _STEPS, generator=dice, device="cpu") < 0.4
            resets[0, 0] = True
            if lengths is not None:
                resets &= torch.arange(_STEPS, device="cpu") < lengths[:, None]
        own = Task(task.x.detach()[:, places], task.state and task.state.detach(), lengths, resets, task.initial)
        yield self._leaves(own, task), _LOSSES[0]
        if own.x.is_floating_point():
            for scale, loss in zip(_SCALES, _LOSSES, strict=True):
                assert own.state is not None
                parts = {name: _drawn(part, scale, dice) for name, part in own.state.items()}
                state = State(parts, own.state.batch_axis)
                yield self._leaves(replace(own, x=_drawn(own.x, scale, dice), state=state), task), loss

    def _leaves(self, trial: Task, task: Task) -> Task:
        if self.grad and trial.state is not None and task.state is not None:
            trial.x.requires_grad_(task.x.requires_grad)
            for name, part in trial.state.items():
                part.requires_grad_(task.state[name].requires_grad)
        return trial

    def _by_loop(self, task: Task, loss: Loss | None) -> list[Tensor | None]:
        with _same_numbers():
            return self._outcome(task, run_loop(self.step.layer, task), loss)

    def _by_schedule(self, schedule: Schedule, task: Task, loss: Loss | None) -> list[Tensor | None]:
        with _same_numbers():
            return self._outcome(task, execute(schedule, lay_out(self.step, task)), loss)

    def _outcome(self, task: Task, result: tuple[Tensor, State], loss: Loss | None) -> list[Tensor | None]:
        out, state = result
        values = [out, *state.values()]
        wanted = self._wanted(task) if loss is not None else []
        roots = [loss(value) for value in values if loss is not None and value.requires_grad]
        # From each alone too: what it does not reach has no gradient, rather than one of zeros.
        together = [roots, *([root] for root in roots if len(roots) > 1)] if wanted else []
        grads = [torch.autograd.grad(some, wanted, retain_graph=True, allow_unused=True) for some in together if some]
        return [*(value.detach() for value in values), *(grad for found in grads for grad in found)]

    def _wanted(self, task: Task) -> list[Tensor]:
        """Return the tensors whose gradients are compared; a hook on one of them would be called."""
        if not self.grad:
            return []
        assert task.state is not None
        weights = self.step.reading.weights
        # Behind a weight that was computed lies a graph of the user's, with hooks of its own.
        others = [] if any(weight.grad_fn is not None for weight in weights) else self.step.layer.module.parameters()
        found = [*weights, *others, task.x, *task.state.values()]
        once = {id(tensor): tensor for tensor in found if tensor.requires_grad and not tensor._backward_hooks}
        return list(once.values())


def mixes(run: Run) -> bool:
    """Say whether a row's step depends on what the other rows are, be it ever so little, or how many there are."""
    layer, task, rounding = run.step.layer, run.task, tolerance_of(run)
    assert task.state is not None
    batch, now = task.x.shape[0], Task(task.x.detach()[:, :1], task.state.detach())
    if run.step.reading.graph.counts:
        return True
    if batch == 1:
        return False
    # Fewer rows are multiplied by other kernels: these agree to the last digits only for float32 on a processor.
    exact = rounding == _TOLERANCE[torch.float64] or (rounding == _TOLERANCE[torch.float32] and not task.x.is_cuda)
    try:
        with torch.no_grad(), untouched(layer.module):
            return _differs(layer, now, fewer=min(rounding, _NEAR) if exact else rounding)
    except Exception:  # a step that fails for other rows, as statistics of batches do for one, does not let them be
        return True


def _differs(layer: Layer, now: Task, *, fewer: float) -> bool:
    whole, draws = _seeded(layer, now)
    for rows in (slice(0, 1), slice(1, None)):
        # What is no number makes all that it takes part in no number; whole numbers have none such.
        others = [(_parts(_seeded(layer, other)[0], rows), _NEAR) for other in (_without(now, rows), _like(now, rows))]
        if not draws:  # else fewer rows are given other numbers
            others.append((_parts(_seeded(layer, Task(now.x[rows], _rows(now.state, rows)))[0], None), fewer))
        if not all(_near(found, _parts(whole, rows), near) for found, near in others):
            return True
    return False


def _seeded(layer: Layer, task: Task) -> tuple[tuple[Tensor, State], bool]:
    """Return what a step gives, and whether it draws random numbers."""
    with _same_numbers():
        before = random_streams()
        return run_loop(layer, task), not all(map(torch.equal, before, random_streams()))


def _near(found: list[Tensor], expected: list[Tensor], near: float) -> bool:
    pairs = zip(found, expected, strict=True)
    return all(torch.allclose(a.double(), b.double(), rtol=near, atol=near, equal_nan=True) for a, b in pairs)


def _parts(result: tuple[Tensor, State], rows: slice | None) -> list[Tensor]:
    out, state = result
    return [out, *state.values()] if rows is None else [out[rows], *state.select(rows).values()]


def _of_steps(task: Task, steps: int) -> Task:
    """Return a task of so many steps, repeated where there are fewer; rows that end do so as early in it."""
    place = torch.arange(steps, device="cpu") % task.x.shape[1]
    lengths = task.lengths
    if lengths is not None:
        lengths = (lengths * steps // task.x.shape[1]).clamp(min=1)
    resets = None if task.resets is None else task.resets[:, place]
    state = task.state and task.state.detach()
    return Task(task.x.detach()[:, place.to(task.x.device)], state, lengths, resets, task.initial)


def _rows(state: State | None, rows: slice) -> State:
    assert state is not None
    return state.select(rows)


def _without(task: Task, rows: slice) -> Task:
    """Return a task in which only some rows have numbers."""
    assert task.state is not None
    kept = torch.zeros(task.x.shape[0], dtype=torch.bool, device=task.x.device)
    kept[rows] = True

    def some(value: Tensor, axis: int) -> Tensor:
        if not value.is_floating_point():
            return value
        mask = kept.to(value.device).view([-1 if place == axis else 1 for place in range(value.dim())])
        return torch.where(mask, value, torch.full((), torch.nan, dtype=value.dtype, device=value.device))

    axes = task.state.batch_axis
    return Task(some(task.x, 0), State({n: some(p, axes[n]) for n, p in task.state.items()}, axes))


def _like(task: Task, rows: slice) -> Task:
    """Return a task in which all other rows are copies of one of these."""
    assert task.state is not None
    places = torch.arange(task.x.shape[0], device=task.x.device)
    kept = torch.zeros_like(places, dtype=torch.bool)
    kept[rows] = True
    places = torch.where(kept, places, places[rows][0])
    return Task(task.x[places], task.state.select(places))


def agree(ours: Sequence[Tensor | None], theirs: Sequence[Tensor | None], tolerance: float) -> None:
    """Refuse results that differ by more than rounding, as a whole or at any place."""
    # A gradient that is zero but for rounding is judged by the size of the others.
    size = max((_typical(other) for other in theirs if other is not None), default=0.0)
    for one, other in zip(ours, theirs, strict=True):
        if one is None or other is None:
            if one is not other:
                raise Untraceable("its schedule reaches other tensors by a gradient than the plain loop")
            continue
        if one.shape != other.shape or one.dtype != other.dtype:
            kinds = f"{one.dtype} {tuple(one.shape)}, not {other.dtype} {tuple(other.shape)}"
            raise Untraceable(f"its schedule gives {kinds}")
        if not _same(one, other, tolerance, size):
            raise Untraceable("its schedule gives other numbers than the plain loop")


def _same(one: Tensor, other: Tensor, tolerance: float, size: float) -> bool:
    if not one.is_floating_point():
        return torch.equal(one, other)
    # NaN and infinity may be right; they have to be in the same places.
    finite = torch.isfinite(other)
    if not bool((finite | (one == other) | (one.isnan() & other.isnan())).all()):
        return False
    left, right = one[finite].double(), other[finite].double()
    away = (left - right).abs()
    if not bool(away.norm() <= tolerance * (right.norm() + 0.01 * size * finite.sum().sqrt() + 1e-6)):
        return False
    return bool((away <= _ALONE * tolerance * (right.abs() + _typical(other) + 0.01 * size + 1e-6)).all())


def _spoiled(task: Task, edge: float) -> Task:
    """Return a task with a number put into the second step of its first row, and into the state of its last."""
    assert task.state is not None

    def held(dtype: torch.dtype) -> float:
        # Beside the largest number there is, the matrix unit's rounding would reach infinity.
        return min(edge, 0.99 * torch.finfo(dtype).max) if math.isfinite(edge) else edge

    x, state = task.x.detach().clone(), task.state.detach().clone()
    if x.is_floating_point():
        x[0, min(1, x.shape[1] - 1)].view(-1)[:1] = held(x.dtype)
    for name, part in state.items():
        if part.is_floating_point():
            last = part.select(state.batch_axis[name], -1)
            last[(0,) * last.dim()] = held(part.dtype)
    return replace(task, x=x, state=state)


def _finite(results: Sequence[Tensor | None]) -> bool:
    return all(bool(value.isfinite().all()) for value in results if value is not None)


def _typical(tensor: Tensor) -> float:
    """Return the size of a tensor's finite numbers: the root of their mean square."""
    if not tensor.is_floating_point():
        return 0.0
    finite = tensor[torch.isfinite(tensor)].double()
    return float(finite.square().mean().sqrt()) if finite.numel() else 0.0


def _drawn(like: Tensor, scale: float, dice: torch.Generator) -> Tensor:
    """Return numbers as large as a tensor's own, times a scale; whole numbers and truths as they are."""
    if not like.is_floating_point():
        return like.detach().clone()
    size = scale * min(max(_typical(like.detach()), 0.1), 10.0)
    drawn = torch.randn(like.shape, generator=dice, dtype=torch.float64, device="cpu") * size
    return drawn.to(like.device, like.dtype)


def tolerance_of(run: Run) -> float:
    """Return what rounding may make of a few steps, by the coarsest dtype that takes part in them."""
    device = run.x.device.type
    present = {tensor.dtype for tensor in run.tensors}
    if torch.is_autocast_enabled(device):
        present.add(torch.get_autocast_dtype(device))
    coarsest = next((dtype for dtype in _TOLERANCE if dtype in present), torch.float32)
    # Matrix units round the factors of float32 products to ten bits where torch allows them to.
    return max(_TOLERANCE[coarsest], 0.02 if device == "cuda" and coarsest is torch.float32 else 0.0)


@contextmanager
def _same_numbers() -> Iterator[None]:
    """Have the same random numbers drawn inside at every time, and none of the user's."""
    with random_streams_kept():
        seed(0)
        yield


def _as_asked(grad: bool) -> torch.set_grad_enabled:
    return torch.set_grad_enabled(grad)
