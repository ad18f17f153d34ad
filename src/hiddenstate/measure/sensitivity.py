"""The size of d output / d input at every step: by closed forms for torch's layers, otherwise by autograd."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..cells import Arguments, around
from ..errors import BadInput
from ..state import shown_in_short
from .progress import tracked
from .series import first_bad
from .torch_system import TorchSystem

_EXACT = 64  # up to this number of outputs, every one is differentiated
_PROBES = 16  # random directions of the output if there are more
_CHUNK = 2**19  # numbers in the Jacobians held at once: what fits into a cache


class Leaf:
    """The input of a model, and the tensors in it to differentiate by.

    For real numbers that is the input itself. Tokens have no gradient: for them it is the result of the model's first
    `nn.Embedding`, which may embed all tokens at once, or step by step in a loop.
    """

    def __init__(self, x: Tensor, valid: Tensor, *, time_axis: int) -> None:
        """Take the input with its time axis, 0 or 1; `valid (batch, time)` says which steps are real."""
        self.x = x.detach()
        self._by_row = time_axis == 1  # whether rows come before steps in the differentiated tensors
        self._leaves: list[Tensor] = []
        self._steps = False  # whether there is one leaf for each step
        if x.is_floating_point() or x.is_complex():
            padding = ~(valid if time_axis == 1 else valid.T)
            # Padding may hold NaN, and zero times NaN is NaN in a backward pass.
            self.x = self.x.masked_fill(padding.reshape(*padding.shape, *[1] * (x.dim() - 2)), 0).requires_grad_()
            self._leaves = [self.x]

    @contextmanager
    def attached(self, model: nn.Module) -> Iterator[None]:
        """Within this context, the results of the model's embeddings of the tokens become leaves."""
        embeddings = [] if self._leaves else [m for m in model.modules() if isinstance(m, nn.Embedding)]
        handles = [around(embedding, self._make_leaf) for embedding in embeddings]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def squares(self, y: Tensor) -> Tensor:
        """Return the squared size of dy/dx for a scalar y, at each row and step: (batch, time)."""
        leaves = self._found()
        found = torch.autograd.grad(y, leaves, retain_graph=True, allow_unused=True)
        sizes = [torch.zeros_like(leaf) if g is None else g for leaf, g in zip(leaves, found, strict=True)]
        if self._steps:
            rows = self.x.shape[0 if self._by_row else 1]
            steps = [size.abs().double().square().reshape(rows, -1).sum(1) for size in sizes]
            missing = [torch.zeros_like(steps[0])] * (self.x.shape[1 if self._by_row else 0] - len(steps))
            return torch.stack(steps + missing, dim=1)
        steps_of = sizes[0].abs().double().square()  # in double: squares of small numbers need its range
        steps_of = steps_of.flatten(2).sum(2) if steps_of.dim() > 2 else steps_of
        return steps_of if self._by_row else steps_of.T

    def _found(self) -> list[Tensor]:
        if not self._leaves:
            raise BadInput(
                f"the input is {self.x.dtype}, so its gradient begins at an embedding, but no nn.Embedding of this "
                f"model was called with it. Give the model real numbers (one-hot or embedded), or an nn.Embedding."
            )
        return self._leaves

    def _make_leaf(self, arguments: Arguments, run: Callable[[Arguments], Tensor]) -> Tensor:
        output = run(arguments)
        args, kwargs = arguments
        tokens = args[0] if args else kwargs.get("input")
        if not isinstance(tokens, Tensor) or not self._expected(tokens):
            return output
        self._leaves.append(output.detach().requires_grad_())
        return self._leaves[-1]

    def _expected(self, tokens: Tensor) -> bool:
        """Say whether these are all tokens, or those of the next step; note how they are laid out."""
        if not self._leaves:
            for flipped in (False, True):
                whole = self.x.transpose(0, 1) if flipped else self.x
                if tokens.shape == whole.shape and torch.equal(tokens, whole):
                    self._by_row ^= flipped
                    return True
        elif not self._steps:
            return False
        axis = 1 if self._by_row else 0
        if len(self._leaves) >= self.x.shape[axis]:
            return False
        self._steps = torch.equal(tokens.flatten(), self.x.select(axis, len(self._leaves)).flatten())
        return self._steps


@shown_in_short
@dataclass(frozen=True, slots=True, eq=False)
class Sensitivity:
    """‖d output / d input‖² at each step."""

    squares: Tensor  # (batch, time) float64; NaN for steps that an interruption left out
    exact: bool  # whether all outputs were differentiated, not only random directions
    interrupted: bool


def by_autograd(y: Tensor, leaf: Leaf, probes: int | None) -> Sensitivity:
    """Go back from `y (batch, unit)` once for each unit or direction, with all rows at once."""
    units = y.shape[1]
    if not y.requires_grad:
        leaf.squares(y.detach().requires_grad_().sum())  # raises with an explanation if tokens were never embedded
        raise BadInput(
            "the output does not depend on the input in a way that has a gradient. Often it is computed under "
            "torch.no_grad(), detached, or rounded on the way: measure an earlier output, with output=."
        )
    if not units:
        raise BadInput("the output has no units: there is nothing to differentiate.")
    exact, count = _directions_needed(units, probes)
    total, done, interrupted = torch.zeros(()), 0, False
    try:
        for direction in tracked(_directions(y, count, exact), "memory", count):
            total = total.to(y.device) + leaf.squares((y * direction).sum())
            done += 1
    except KeyboardInterrupt:
        if not done:
            raise
        interrupted = True
    return Sensitivity(total * (units / done if exact else 1 / done), exact and not interrupted, interrupted)


def by_closed_form(
    system: TorchSystem, x: Tensor, valid: Tensor, ends: Tensor, *, probes: int | None = None
) -> Sensitivity:
    """Go back from the visible part of each row's state at `ends` through the Jacobians of all steps."""
    start = system.initial(len(x))
    states = system.walk(x, start)  # (batch, time, S)
    top = system.levels[-1].h
    y = at_steps(states[..., top], ends, valid, time_axis=1)
    exact, count = _directions_needed(y.shape[1], probes)
    goal = y.new_zeros(len(x), count, system.size)  # d (chosen outputs) / d state at the end
    goal[..., top] = torch.stack([d.expand_as(y) for d in _directions(y, count, exact)], dim=1)
    before = torch.cat([start.unsqueeze(1), states[:, :-1]], dim=1)
    squares = y.new_full(x.shape[:2], torch.nan, dtype=torch.float64)  # squares of small numbers need its range
    reached, interrupted = torch.zeros_like(goal), False
    last = int(ends.max())
    try:
        for step, jacobian in tracked(_backwards(system, x, before, last), "memory", last + 1):
            begins = ends == step
            if bool(begins.any()):
                reached = torch.where(begins[:, None, None], goal, reached)
            pulled = reached @ jacobian  # (batch, count, S + feature)
            squares[:, step] = pulled[..., system.size :].double().square().sum((1, 2))
            reached = pulled[..., : system.size]
    except KeyboardInterrupt:
        if bool(squares.isnan().all()):
            raise
        interrupted = True
    return Sensitivity(squares * (1 if exact else 1 / count), exact, interrupted)


def _backwards(system: TorchSystem, x: Tensor, before: Tensor, last: int) -> Iterator[tuple[int, Tensor]]:
    """Yield the steps from `last` to 0, each with d next / d (state, input) there: (batch, S, S + feature)."""
    x, before = x.transpose(0, 1), before.transpose(0, 1)  # time first, so that each step is contiguous
    stride = max(1, _CHUNK // (x.shape[1] * system.size * (system.size + x.shape[2])))
    for end in range(last + 1, 0, -stride):
        begin = max(0, end - stride)
        found = system.whole_jacobians(x[begin:end].flatten(0, 1), before[begin:end].flatten(0, 1))
        found = found.reshape(end - begin, -1, *found.shape[1:])
        for step in range(end - 1, begin - 1, -1):
            yield step, found[step - begin]


def _directions_needed(units: int, probes: int | None) -> tuple[bool, int]:
    """Say whether every output is differentiated, and how many backward passes are needed."""
    exact = units <= _EXACT and probes is None
    return exact, units if exact else probes or _PROBES


def _directions(y: Tensor, count: int, exact: bool) -> Iterator[Tensor]:
    generator = torch.Generator().manual_seed(0)  # separate: the user's random stream is not used
    for unit in range(count):
        if exact:
            yield torch.nn.functional.one_hot(torch.tensor(unit, device=y.device), y.shape[1]).to(y.dtype)
        else:
            yield torch.randn(y.shape, generator=generator, dtype=torch.float64).to(y)


def tensor_of(output: Any) -> Tensor:
    """Return the tensor in a model's result: itself, the first of a tuple, or the usual entry of a mapping.

    Whole numbers before it, such as a sampled action, have no gradient and are skipped.
    """
    if isinstance(output, Tensor):
        return output
    if isinstance(output, tuple | list) and output:
        real = [each for each in output if isinstance(each, Tensor) and each.is_floating_point()]
        first = output[0]
        whole = isinstance(first, Tensor) and not first.is_floating_point() and not first.is_complex()
        return tensor_of(real[0] if whole and real else first)
    for name in ("logits", "last_hidden_state", "output"):
        found = output.get(name) if isinstance(output, dict) else getattr(output, name, None)
        if isinstance(found, Tensor):
            return found
    raise BadInput(
        f"the model returned {type(output).__name__}, in which no output tensor was recognized: "
        f"give output=, a function that takes what the model returns and gives a tensor."
    )


def at_steps(output: Tensor, ends: Tensor, valid: Tensor, *, time_axis: int) -> Tensor:
    """Return the output at each row's step `ends (batch,)`, or the single output of each row: (batch, unit)."""
    _refuse_numberless(output)
    batch, time = valid.shape
    if output.dim() == 0:  # one number for all rows, such as a loss: each row contributes to it
        output = (output / batch).expand(batch)
    if time_axis == 0 and output.shape[:2] == (time, batch):
        output = output.transpose(0, 1)
    if has_steps(output, valid, time_axis=1):
        _refuse_bad(output.reshape(batch, time, -1), valid)
        output = output[torch.arange(batch, device=output.device), ends.to(output.device)]
    elif output.shape[0] != batch:
        if time_axis == 0 and output.dim() > 1 and output.shape[1] == batch:  # taps or a horizon, time first
            return at_steps(output.transpose(0, 1), ends, valid, time_axis=1)
        hint = "For a time-first model give time_axis=0, for others output=."
        if len(output) == batch * time:  # flattened for a loss, in an unknown order
            order = f"{time}, {batch}" if time_axis == 0 else f"{batch}, {time}"
            hint = f"All steps in one axis are parted by output=lambda out: out.view({order}, -1)."
        raise BadInput(
            f"the output has shape {tuple(output.shape)}, but the input has {batch} rows of {time} steps: neither "
            f"(batch, time, unit) nor (batch, ...). {hint}"
        )
    else:
        _refuse_bad(output.reshape(batch, 1, -1), valid.any(1, keepdim=True))
    output = torch.view_as_real(output) if output.is_complex() else output
    return output.reshape(batch, -1)


def has_steps(output: Tensor, valid: Tensor, *, time_axis: int) -> bool:
    """Say whether an output has a step for each step of the input, not just one value for each row."""
    batch, time = valid.shape
    return tuple(output.shape[:2]) == ((batch, time) if time_axis == 1 else (time, batch))


def _refuse_numberless(output: Tensor) -> None:
    if not isinstance(output, Tensor):
        raise BadInput(f"output= returned {type(output).__name__}, but a tensor is needed.")
    if not output.is_floating_point() and not output.is_complex():
        raise BadInput(
            f"the output is {output.dtype}, which has no gradient. Often an argmax ends the model: "
            f"measure its scores instead, with output=."
        )


def _refuse_bad(output: Tensor, valid: Tensor) -> None:
    where = first_bad(output.detach(), valid.to(output.device))
    if where is None:
        return
    row, step, _ = where
    place = f"row {row} from step {step} on" if output.shape[1] > 1 else f"row {row}"
    raise BadInput(
        f"the output of {place} is not finite, so it has no gradient that means anything. "
        f"Look for NaN or Inf in the input and the weights; hs.measure.statistics finds the first in a trajectory."
    )
