"""Where rows and steps are in what a model takes and gives, found by trying it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree

from ..cells import Call, Layer, Listener, Proceed, invented_inputs, layers, listen, untouched, unwrap
from ..errors import BadInput, HiddenStateError, NotServable

# Sizes that cannot be taken for each other, or for each other's products.
_TRIALS = ((2, 5), (3, 5), (2, 7))  # (rows, steps)


@dataclass(frozen=True, slots=True)
class Leaf:
    """One tensor of the output: which axes grow with rows and steps; the same one where the model flattens both."""

    rows: int
    steps: int | None
    dtype: torch.dtype = torch.float32
    shape: tuple[int, ...] = ()  # of one step of one row, or of one row where there are no steps

    def ordered(self, tensor: Tensor, sizes: tuple[int, int], *, rows_first: bool) -> Tensor:
        """Return it with rows first and steps second; `sizes` are how many of each."""
        if self.steps is None:
            return tensor.movedim(self.rows, 0)
        if self.steps == self.rows:
            apart = tensor.reshape(
                *tensor.shape[: self.rows], *(sizes if rows_first else sizes[::-1]), *tensor.shape[self.rows + 1 :]
            )
            axes = (self.rows, self.rows + 1) if rows_first else (self.rows + 1, self.rows)
            return apart.movedim(axes, (0, 1))
        return tensor if (self.rows, self.steps) == (0, 1) else tensor.movedim((self.rows, self.steps), (0, 1))


@dataclass(frozen=True, slots=True)
class Layout:
    """How a model takes its input and gives its output."""

    step_shape: tuple[int, ...]  # of one step of one row
    dtype: torch.dtype
    device: torch.device
    rows_axis: int
    steps_axis: int | None  # None: each call is one step
    leaves: tuple[Leaf | None, ...]  # None where the output holds a None
    tree: Any  # how the output is nested
    sample: Tensor  # (steps, *step_shape)

    @property
    def width(self) -> int:
        """How many bytes one step has."""
        return self.dtype.itemsize * math.prod(self.step_shape)

    def input(self, rows: Tensor) -> Tensor:
        """Return `rows (row, step, ...)` as the model takes them; of one step where it knows no other."""
        if self.steps_axis is None:
            return rows[:, 0]
        return rows if self.rows_axis == 0 else rows.transpose(0, 1)


def output_of(model: nn.Module, found: Sequence[Layer], x: Tensor) -> Any:
    """Call the model; where it is itself a recurrent layer, its output without the state."""
    result = model(x)
    return found[0].split(result)[0] if found[0].module is unwrap(model) else result


def find_layout(model: nn.Module, example: Tensor | None) -> Layout:
    """Return the layout of `model`, from an example of its input or from a guess at one."""
    found = layers(model)
    reasons: list[str] = []
    with untouched(model), torch.no_grad():
        model.eval()
        for sample, axes in _candidates(model, found, example):
            try:
                return _tried(model, found, sample, axes)
            except HiddenStateError as error:
                reasons.append(str(error))
            except Exception as error:  # a trial: whatever a user's model raises means that this layout is not its own
                reasons.append(f"{type(error).__name__}: {error}")
    raise NotServable(_unserved(model, example, reasons))


def _unserved(model: nn.Module, example: Tensor | None, reasons: list[str]) -> str:
    name = type(model).__name__
    tried = "; ".join(dict.fromkeys(reason.split("\n")[0] for reason in reasons)) or "nothing could be tried"
    if example is None:
        return (
            f"no input could be made up that {name} takes ({tried}). Give one: Engine(model, example=x), with x as the "
            f"model takes it, for example (batch, time, feature)."
        )
    return (
        f"{name} does not take inputs like the example {tuple(example.shape)} with other numbers of rows and steps "
        f"({tried}). The example is one whole input, for example (batch, time, feature)."
    )


def _candidates(
    model: nn.Module, found: Sequence[Layer], example: Tensor | None
) -> Iterator[tuple[Tensor, tuple[int, int | None]]]:
    """Pairs of a sample `(steps, ...)` and the axes of rows and steps to try it with."""
    first = found[0]
    both: list[tuple[int, int | None]] = [(0, 1), (1, 0)]
    if first.fused and not first.spec.batch_first:
        both.reverse()
    one: list[tuple[int, int | None]] = [(0, None)]
    if example is not None:
        example = torch.as_tensor(example)
        for rows, steps in (both if example.dim() > 1 else []) + (one if example.dim() else []):
            row = example.select(rows, 0) if example.shape[rows] else example
            yield (row if steps is not None else row.unsqueeze(0)), (rows, steps)
        return
    for sample in invented_inputs(model, 8):
        for axes in both + one:
            yield sample, axes


def _tried(model: nn.Module, found: Sequence[Layer], sample: Tensor, axes: tuple[int, int | None]) -> Layout:
    weight = next((tensor for tensor in (*model.parameters(), *model.buffers())), torch.empty(0))
    sample = sample.to(weight.device)
    outputs = []
    for rows, steps in _TRIALS:
        x = _probe(sample, rows, steps if axes[1] is not None else 1)  # (row, step, ...)
        native = x[:, 0] if axes[1] is None else x if axes[0] == 0 else x.transpose(0, 1)
        counted = _Rows()
        handle = listen(model, found, counted)
        try:
            outputs.append(output_of(model, found, native))
        finally:
            handle.remove()
        if {seen for _, seen in counted.of} != {rows}:
            saw = ", ".join(f"{name} saw {seen}" for name, seen in sorted(counted.of)) or "its layers saw none"
            raise BadInput(f"with {rows} rows in, {saw}")
    tensors, trees = zip(*(_pytree.tree_flatten(output) for output in outputs), strict=True)
    if len(set(map(str, trees))) != 1:
        raise BadInput("its output is nested differently with other numbers of rows or steps")
    leaves = tuple(_leaf(place, three) for place, three in enumerate(zip(*tensors, strict=True)))
    if not any(leaves):
        raise BadInput("it returns nothing")
    return Layout(tuple(sample.shape[1:]), sample.dtype, sample.device, *axes, leaves, trees[0], sample.clone())


def _probe(sample: Tensor, rows: int, steps: int) -> Tensor:
    """Rows that differ: each the sample's steps over and over, begun at another one."""
    places = (torch.arange(rows)[:, None] + torch.arange(steps)) % len(sample)
    return sample[places.to(sample.device)]


class _Rows(Listener):
    """Counts the rows that each layer runs."""

    def __init__(self) -> None:
        self.of: set[tuple[str, int]] = set()  # (layer, rows)

    def layer_call(self, call: Call, proceed: Proceed) -> Call:
        self.of.add((call.layer.label, call.rows))
        return proceed(call)


def _leaf(place: int, three: tuple[Any, ...]) -> Leaf | None:
    if all(tensor is None for tensor in three):
        return None
    if not all(isinstance(tensor, Tensor) for tensor in three) or len({tensor.dim() for tensor in three}) != 1:
        raise BadInput(f"output {place} is {type(three[0]).__name__}, but tensors are needed")
    sizes = list(zip(*(tensor.shape for tensor in three), strict=True))
    rows = [axis for axis, size in enumerate(sizes) if size == tuple(r for r, _ in _TRIALS)]
    steps = [axis for axis, size in enumerate(sizes) if size == tuple(s for _, s in _TRIALS)]
    merged = [axis for axis, size in enumerate(sizes) if size == tuple(r * s for r, s in _TRIALS)]
    if merged and not rows:
        rows = steps = merged[:1]
    if not rows:
        raise BadInput(f"output {place} has shape {tuple(three[0].shape)}, in which no axis has one entry for each row")
    rest = tuple(n for axis, n in enumerate(three[0].shape) if axis not in (rows[0], *steps[:1]))
    return Leaf(rows[0], steps[0] if steps else None, three[0].dtype, rest)
