"""Batches: the inputs of many sessions in one call of the model, a row for each session, and what came of it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor

from ..errors import ModelFailed, ServeError
from ..state import Format, State
from .arena import Slots, array_of, as_slots
from .model import ModelLayout, ServedModel
from .session_operations import OutputRow, Push, PushChain, PushMany
from .stores import Blobs, Ints

RowInput: TypeAlias = "Push | PushChain"  # what goes into one row of a batch

_NUMPY_FLOATS = (torch.float32, torch.float64)
_MOST_FORMATS = 64  # kept at once: one for each length and nesting of output that is in use
_tuple = tuple.__new__  # makes a named tuple in half the time, which counts with hundreds in a tick


class InputShape(NamedTuple):
    """What the rows of a batch must have in common for their outputs to be one tensor."""

    steps: int  # of one input
    single_step: bool  # given as one step without a time axis
    inputs: int = 1  # consecutive ones, in each row

    @staticmethod
    def of(given: Push | PushChain | PushMany) -> InputShape:
        """Return the shape of some inputs."""
        if type(given) is PushChain:
            first = given.pushes[0]
            return InputShape(first.steps, first.single_step, len(given.pushes))
        assert not isinstance(given, PushChain)
        return InputShape(given.steps, given.single_step)


@dataclass(slots=True)
class Batch:
    """Inputs for one call of the model, each with the slot of its session."""

    inputs: list[RowInput] | PushMany
    slots: Ints
    initial: bool  # all of these sessions start from the initial state
    at: Slots = field(init=False)  # the slots, as a slice where they can be one

    def __post_init__(self) -> None:
        """Make a slice of the slots if possible."""
        self.at = as_slots(self.slots)

    def __len__(self) -> int:
        """Return how many rows there are."""
        return len(self.slots)

    @property
    def rows(self) -> Sequence[RowInput]:
        """The input of each row."""
        return self.inputs.as_pushes() if isinstance(self.inputs, PushMany) else self.inputs

    @property
    def sessions(self) -> list[str]:
        """The session of each row."""
        return self.inputs.sessions if isinstance(self.inputs, PushMany) else [row.session for row in self.inputs]

    def shapes(self) -> list[InputShape]:
        """Return the different shapes of input there are."""
        if isinstance(self.inputs, PushMany):
            return [InputShape.of(self.inputs)]
        if all([type(row) is Push for row in self.inputs]):
            return [InputShape(*shape) for shape in {(row.steps, row.single_step) for row in self.inputs}]  # type: ignore[union-attr]
        return list(set(map(InputShape.of, self.inputs)))

    def select(self, rows: Sequence[int]) -> Batch:
        """Return these rows alone."""
        inputs = self.rows
        return Batch([inputs[row] for row in rows], self.slots[list(rows)], self.initial)

    def lengths(self) -> list[int]:
        """Return the steps of each row."""
        return [shape.steps * shape.inputs for shape in map(InputShape.of, self.rows)]

    def tensor(self, layout: ModelLayout, *, padded: bool) -> Tensor:
        """Return all inputs as one tensor `(row, step, ...)`, padded where their lengths differ."""
        if isinstance(self.inputs, PushMany):
            return self.inputs.source
        if padded:
            pieces = [
                torch.cat([push.piece(layout.dtype, layout.step_shape) for push in _pushes(row)]) for row in self.inputs
            ]
            return torch.nn.utils.rnn.pad_sequence(pieces, batch_first=True)
        pushes = [push for row in self.inputs for push in (row.pushes if type(row) is PushChain else (row,))]
        return _stacked(pushes, layout).reshape(len(self), -1, *layout.step_shape)  # type: ignore[arg-type]


@dataclass(slots=True)
class BatchResult:
    """What the model made of a batch whose inputs have one shape."""

    batch: Batch
    shape: InputShape
    after: State  # the new state of each row
    leaves: list[Tensor | None]  # outputs, each (input, ...): those of the first row, then those of the second
    answers: Blobs | None  # the same as they are to be kept

    def settle(self, seqs: Ints) -> None:
        """Set every input's result and number; `seqs` has the number of the last input of each row."""
        if isinstance(self.batch.inputs, PushMany) and self.batch.inputs.pushes is None:
            self.batch.inputs.result = self.leaves
            return
        leaves, answers, ahead = self.leaves, self.answers, self.shape.inputs - 1
        place = 0
        for row, last in zip(self.batch.rows, seqs.tolist(), strict=True):
            for seq, push in enumerate(row.pushes if type(row) is PushChain else (row,), last - ahead):
                push.seq = seq  # type: ignore[union-attr]
                push.result = _tuple(OutputRow, (leaves, place, answers))
                place += 1

    def select(self, rows: Sequence[int]) -> BatchResult:
        """Return these rows alone."""
        index = torch.tensor(list(rows))
        inputs = (index[:, None] * self.shape.inputs + torch.arange(self.shape.inputs)).flatten()
        return BatchResult(
            self.batch.select(rows),
            self.shape,
            self.after.select(index),
            [None if leaf is None else leaf.index_select(0, inputs.to(leaf.device)) for leaf in self.leaves],
            None if self.answers is None else self.answers.select(inputs.tolist()),
        )


class BatchRunner:
    """Runs batches on the model, and finds the rows that made it fail."""

    def __init__(
        self,
        model: ServedModel,
        gather: Callable[[Slots], State],
        *,
        keep_answers: bool,
        put_back: Callable[[PushChain], None],
    ) -> None:
        """Run on `model` with the states that `gather` returns.

        A chain that fails is cut to its first input by `put_back`, which queues the others again.
        """
        self._model, self._gather, self._put_back = model, gather, put_back
        self._keep_answers = keep_answers
        self._formats: dict[tuple[Any, ...], Format] = {}

    def group(self, inputs: Sequence[RowInput], slots: Ints, initial: Sequence[bool]) -> list[Batch]:
        """Group inputs into batches that can each go into one call."""
        groups: dict[tuple[bool, int, int], list[int]] = {}
        ragged = self._model.ragged
        for row, given in enumerate(inputs):
            # Lengths within a factor of two of each other, so that padding never costs more than the work itself.
            if type(given) is PushChain:
                key = (initial[row], -len(given.pushes), given.pushes[0].steps)
            else:
                steps: int = given.steps  # type: ignore[union-attr]
                key = (initial[row], 1, steps.bit_length() if ragged else steps)
            if key in groups:
                groups[key].append(row)
            else:
                groups[key] = [row]
        if len(groups) == 1:
            return [Batch(list(inputs), slots, bool(initial[0]))]
        return [Batch([inputs[row] for row in rows], slots[rows], key[0]) for key, rows in groups.items()]

    def run(self, batches: Sequence[Batch]) -> list[BatchResult]:
        """Return the results of all rows that succeeded; inputs that failed get their error as result."""
        results: list[BatchResult] = []
        for batch in batches:
            self._run(batch, results)
        return results

    def _run(self, batch: Batch, results: list[BatchResult]) -> None:
        shapes = batch.shapes()
        steps = None if len({shape.steps * shape.inputs for shape in shapes}) == 1 else batch.lengths()
        try:
            before = None if batch.initial else self._gather(batch.at)
            leaves, after = self._model.run(batch.tensor(self._model.layout, padded=steps is not None), before, steps)
        except Exception as error:  # whatever a user's model raises
            self._run_halves(batch, error, results)
            return
        if len(shapes) == 1:
            self._finish(BatchResult(batch, shapes[0], after, self._per_input(leaves, shapes[0]), None), results)
            return
        for shape in shapes:
            rows = [row for row, given in enumerate(batch.rows) if InputShape.of(given) == shape]
            index = torch.tensor(rows)
            some = [None if leaf is None else leaf.index_select(0, index.to(leaf.device)) for leaf in leaves]
            selected = batch.select(rows), shape, after.select(index), self._per_input(some, shape)
            self._finish(BatchResult(*selected, None), results)

    def _run_halves(self, batch: Batch, error: Exception, results: list[BatchResult]) -> None:
        """Halve the batch until the input that raised is alone: it must not fail the others."""
        given = batch.rows[0]
        if len(batch) > 1:
            half = len(batch) // 2
            self._run(batch.select(range(half)), results)
            self._run(batch.select(range(half, len(batch))), results)
        elif isinstance(given, PushChain) and len(given) > 1:
            self._put_back(given)
            self._run(batch, results)
        else:
            first_push(given).result = _failure(error)

    def _finish(self, result: BatchResult, results: list[BatchResult]) -> None:
        """Fail the rows in which there is NaN, and add the others to `results`."""
        # Copies: what is kept must not change when a model reuses its tensors, or a caller changes its answer.
        result.after = self._owned(result.after, result.leaves)
        kept = (
            [None if leaf is None else _copy(leaf) for leaf in result.leaves] if self._keep_answers else result.leaves
        )
        bad = _nan_rows(kept, per_row=result.shape.inputs) | self._nan_states(result.after)
        if self._keep_answers:
            result.answers = self._answers(kept)
        if bad:
            self._fail(result, bad, results)
            good = [row for row in range(len(result.batch)) if row not in bad]
            if not good:
                return
            result = result.select(good)
        results.append(result)

    def _fail(self, result: BatchResult, bad: set[int], results: list[BatchResult]) -> None:
        again = []
        for row in sorted(bad):
            given = result.batch.rows[row]
            if isinstance(given, PushChain) and len(given) > 1:
                self._put_back(given)
                again.append(row)
            else:
                first_push(given).result = _nan_failure(result.after, row)
        if again:
            self._run(result.batch.select(again), results)

    def _owned(self, after: State, leaves: list[Tensor | None]) -> State:
        """Return states whose memory neither the model nor the outputs share."""
        shared = {leaf.untyped_storage().data_ptr() for leaf in leaves if leaf is not None}
        if self._model.pure and shared.isdisjoint([part.untyped_storage().data_ptr() for part in after.values()]):
            return after
        return State({name: _copy(part) for name, part in after.items()}, after.batch_axis)

    def _nan_states(self, state: State) -> set[int]:
        """Return the rows whose new state has NaN in it."""
        axes = {name: axis for name, axis in state.batch_axis.items() if name in self._model.nan_parts}
        if not _has_nan([state[name] for name in axes]):
            return set()
        return _nan_rows([state[name].movedim(axis, 0) for name, axis in axes.items()])

    def _per_input(self, leaves: list[Tensor | None], shape: InputShape) -> list[Tensor | None]:
        """Turn outputs `(row, step, ...)` into `(input, ...)`, without the steps that are padding."""
        cut: list[Tensor | None] = []
        for place, leaf in enumerate(leaves):
            if leaf is not None and self._model.has_steps(place):
                leaf = leaf[:, : shape.steps * shape.inputs]
                if shape.inputs > 1:
                    leaf = leaf.reshape(-1, shape.steps, *leaf.shape[2:])
                if shape.single_step:
                    leaf = leaf[:, 0]
            cut.append(leaf)
        return cut

    def _answers(self, leaves: list[Tensor | None]) -> Blobs:
        state = State({str(place): leaf for place, leaf in enumerate(leaves) if leaf is not None})
        key = tuple((name, leaf.dtype, leaf.shape[1:]) for name, leaf in state.items())
        kind = self._formats.get(key)
        if kind is None:
            if len(self._formats) >= _MOST_FORMATS:
                self._formats.clear()
            kind = self._formats[key] = Format(state)
        return Blobs(kind, state)


def first_push(given: RowInput) -> Push:
    """Return the first input of a row."""
    return given.pushes[0] if isinstance(given, PushChain) else given


def _pushes(given: RowInput) -> Sequence[Push]:
    return given.pushes if isinstance(given, PushChain) else (given,)


def _stacked(pushes: Sequence[Push], layout: ModelLayout) -> Tensor:
    """Return inputs of the same number of steps as one tensor `(input, step, ...)`, perhaps flattened."""
    sources = [push.source for push in pushes]
    if not any([isinstance(source, Tensor) for source in sources]):
        return torch.frombuffer(bytearray().join(sources), dtype=layout.dtype)  # type: ignore[arg-type]
    source, first = sources[0], pushes[0].row
    if first is None:
        if all([isinstance(push.source, Tensor) and push.row is None for push in pushes]) and _alike(pushes):
            return torch.stack(sources)  # type: ignore[arg-type]
    elif isinstance(source, Tensor) and all([other is source for other in sources]):
        rows = [push.row for push in pushes]
        if rows == list(range(first, first + len(rows))):
            return source[first : first + len(rows)]
    return torch.stack([push.piece(layout.dtype, layout.step_shape) for push in pushes])


def _alike(pushes: Sequence[Push]) -> bool:
    """Return whether all of these were given with a time axis, or all without."""
    return len({push.single_step for push in pushes}) == 1


def _nan_failure(after: State, row: int) -> ModelFailed:
    parts = [name for name, part in after.items() if bool(part.select(after.batch_axis[name], row).isnan().any())]
    return ModelFailed(
        f"the model gave NaN for this input, in its {'state ' + ', '.join(parts) if parts else 'output'}, so the "
        f"session keeps the state it had before. Usually the input holds NaN, or is far larger than what the model was "
        f"trained on."
    )


def _failure(error: Exception) -> Exception:
    if isinstance(error, ServeError):
        return error
    failure = ModelFailed(
        f"the model raised {type(error).__name__} for this input: {error}. The session keeps the state it had before."
    )
    failure.__cause__ = error
    return failure


def _copy(tensor: Tensor) -> Tensor:
    if (held := array_of(tensor)) is None:
        return tensor.clone(memory_format=torch.contiguous_format)
    copy = torch.empty_like(tensor, memory_format=torch.contiguous_format)
    array_of(copy)[...] = held
    return copy


def _nan_rows(tensors: Sequence[Tensor | None], *, per_row: int = 1) -> set[int]:
    """Return the rows that contain NaN, where `per_row` consecutive entries of a tensor make a row."""
    if not _has_nan(tensors):
        return set()
    bad: set[int] = set()
    for tensor in tensors:
        if tensor is not None and tensor.is_floating_point() and tensor.numel():
            bad.update((torch.isnan(tensor).reshape(len(tensor), -1).any(1).nonzero()[:, 0] // per_row).tolist())
    return bad


def _has_nan(tensors: Sequence[Tensor | None]) -> bool:
    """Return whether there is NaN in any of these: the least of some numbers is NaN where one of them is."""
    floating = [tensor for tensor in tensors if tensor is not None and tensor.is_floating_point() and tensor.numel()]
    if all([tensor.device.type == "cpu" and tensor.dtype in _NUMPY_FLOATS for tensor in floating]):
        with np.errstate(all="ignore"):  # by numpy, in one thread, as slots are copied
            return any([math.isnan(tensor.detach().resolve_neg().numpy().min()) for tensor in floating])
    return bool(torch.stack([tensor.amin().isnan() for tensor in floating]).any())
