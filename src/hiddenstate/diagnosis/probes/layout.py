"""Which axes of the output are rows and steps: seen by leaving out a row, and by leaving out a step."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ...state import Path, tensors
from ..difference import same
from ..inputs import ModelInputs
from ..outcome import Outcome
from ..patient import Patient, PatientProbe
from .calls import FewerRows, PlainCall, attempt


@dataclass(frozen=True, slots=True)
class OutputTensor:
    """One tensor of the output: where its rows and steps are."""

    path: Path
    shape: tuple[int, ...]
    rows: int | None  # None: it has none
    time: int | None  # None: one value for the whole sequence
    merged: str = ""  # "rows" or "time": both are on one axis, and which of them is the outer
    pairs: bool = False  # two axes have rows, as a matrix of similarities does
    state: bool = False  # what a layer ended in, handed out

    @property
    def stepwise(self) -> bool:
        """Whether it has one value for each step."""
        return self.time is not None or bool(self.merged)


@dataclass(frozen=True, slots=True)
class OutputLayout(PatientProbe):
    """All tensors of the output with their axes, and the sequences whose steps they follow."""

    leaves: tuple[OutputTensor, ...]
    aligned: tuple[Path, ...]  # the inputs that have one step for each step of the output
    guessed: bool = False  # the model takes no shorter sequence: steps of the output were told by their number

    @property
    def main(self) -> OutputTensor | None:
        """The output that matters: the first that has rows and is no state."""
        rows = [leaf for leaf in self.leaves if leaf.rows is not None]
        return next((leaf for leaf in rows if not leaf.state), rows[0] if rows else None)

    @classmethod
    def measure(cls, patient: Patient) -> OutputLayout:
        """Leave out a row, then a step of each sequence, and see which axes of the output become shorter."""
        plain, fewer = patient[PlainCall], patient[FewerRows].outcome
        shorter, croppable = None, False
        aligned: tuple[Path, ...] = ()
        for group in _groups(patient.inputs):
            found = attempt(patient, _one_step_less(patient.inputs, group))
            croppable = croppable or found is not None
            if found is not None and _shrank(plain, found):
                shorter, aligned = found, group
                break
        finals = [part for call in plain.calls for part in tensors(call.state_native).values()]
        leaves = [
            _leaf(path, tensor, patient.inputs, fewer=fewer, shorter=shorter, finals=finals)
            for path, tensor in plain.outputs.items()
        ]
        if croppable:
            return cls(tuple(leaves), aligned)
        guesses = [_guessed(leaf, patient.inputs) for leaf in leaves]
        sure = guesses == leaves
        return cls(tuple(guesses), () if sure else (patient.inputs.main,), guessed=not sure)


def _guessed(leaf: OutputTensor, inputs: ModelInputs) -> OutputTensor:
    """Take an axis that has as many entries as there are steps, in their place, for the steps."""
    axis = inputs.argument(inputs.main).time
    if axis is None or leaf.rows is None or axis == leaf.rows or len(leaf.shape) < 3 or inputs.steps < 2:
        return leaf
    return replace(leaf, time=axis) if leaf.shape[axis] == inputs.steps and not leaf.state else leaf


def _groups(inputs: ModelInputs) -> list[tuple[Path, ...]]:
    """Return which sequences are shortened together: each by itself, then all that are as long as the main one."""
    sequences = [a.path for a in inputs.arguments if a.kind == "sequence" and a.time is not None]
    equal = tuple(a.path for a in inputs.arguments if a.time is not None and a.steps == inputs.steps)
    marks = tuple(a.path for a in inputs.arguments if a.kind == "mask" and a.time is not None)
    if inputs.main not in sequences:
        return []
    single = [(path, *(marks if path == inputs.main else ())) for path in sequences]
    groups = [*single, equal] if len(sequences) > 1 else single
    return [group for group in groups if inputs.argument(group[0]).steps > 1]


def _one_step_less(inputs: ModelInputs, group: tuple[Path, ...]) -> ModelInputs:
    steps = inputs.argument(group[0]).steps
    if inputs.lengths is not None and group[0] == inputs.main:
        steps = int(inputs.lengths.max())
    return inputs.crop(max(1, steps - 1), group)


def _shrank(run: Outcome, shorter: Outcome) -> bool:
    others = shorter.outputs
    return any(path in others and others[path].shape != tensor.shape for path, tensor in run.outputs.items())


def _leaf(
    path: Path,
    tensor: Tensor,
    inputs: ModelInputs,
    *,
    fewer: Outcome | None,
    shorter: Outcome | None,
    finals: list[Tensor],
) -> OutputTensor:
    shape = tuple(tensor.shape)
    rows, pairs, folded = _row_axis(shape, path, inputs, fewer)
    time, merged = None, ""
    if shorter is not None and path in shorter.outputs:
        small = tuple(shorter.outputs[path].shape)
        changed = [axis for axis in range(len(shape)) if len(small) == len(shape) and small[axis] != shape[axis]]
        if len(changed) == 1:
            axis = changed[0]
            if shape[axis] - small[axis] == 1 and axis != rows:
                time = axis
            elif axis == rows and folded:
                merged = "rows" if inputs.argument(inputs.main).rows == 0 else "time"
    if folded and not merged:
        rows = None  # as many entries as rows times something else, and what else is unknown
    state = any(final.shape == tensor.shape and same(final, tensor) for final in finals)
    return OutputTensor(path, shape, rows, time, merged, pairs, state)


def _row_axis(
    shape: tuple[int, ...], path: Path, inputs: ModelInputs, fewer: Outcome | None
) -> tuple[int | None, bool, bool]:
    batch = inputs.batch
    if not inputs.batched:
        return None, False, False
    if fewer is None:
        argument = inputs.argument(inputs.main)
        fits = [axis for axis in (argument.rows or 0, 0, 1) if axis < len(shape) and shape[axis] == batch]
        return (fits[0] if fits else None), False, False
    small = tuple(fewer.outputs[path].shape) if path in fewer.outputs else ()
    if len(small) != len(shape):
        return None, False, False
    changed = [axis for axis in range(len(shape)) if small[axis] != shape[axis]]
    plain = [axis for axis in changed if shape[axis] == batch and small[axis] == batch - 1]
    if len(changed) > 1:
        return None, len(plain) > 1, False
    if plain:
        return plain[0], False, False
    folded = [a for a in changed if shape[a] % batch == 0 and small[a] * batch == shape[a] * (batch - 1)]
    return (folded[0], False, True) if folded else (None, False, False)


def by_rows(tensor: Tensor, leaf: OutputTensor, batch: int) -> Tensor:
    """Return an output with rows first, and steps second where it has them."""
    assert leaf.rows is not None
    if leaf.merged:
        flat = tensor.movedim(leaf.rows, 0)
        if leaf.merged == "rows":
            return flat.reshape(batch, -1, *flat.shape[1:])
        return flat.reshape(-1, batch, *flat.shape[1:]).transpose(0, 1)
    if leaf.time is not None:
        return tensor.movedim((leaf.rows, leaf.time), (0, 1))
    return tensor.movedim(leaf.rows, 0)


def final(patient: Patient, run: Outcome) -> Tensor | None:
    """Return the main output of each row, at its last real step: (batch, entries)."""
    leaf = patient[OutputLayout].main
    if leaf is None:
        return _unbatched_final(patient, run)
    tensor = run.outputs.get(leaf.path)
    if tensor is None:
        return None
    rows = by_rows(tensor, leaf, run.inputs.batch)
    if leaf.stepwise:
        last = run.inputs.last.clamp(max=rows.shape[1] - 1)
        if patient.inputs.steps != rows.shape[1] and patient.inputs.lengths is None:
            last = torch.full((len(rows),), rows.shape[1] - 1)
        rows = rows[torch.arange(len(rows)), last]
    return rows.reshape(len(rows), -1)


def _unbatched_final(patient: Patient, run: Outcome) -> Tensor | None:
    if patient.inputs.batched:
        return None
    for leaf in patient[OutputLayout].leaves:
        tensor = run.outputs.get(leaf.path)
        if tensor is not None and not leaf.state:
            last = tensor.movedim(leaf.time, 0)[-1] if leaf.time is not None else tensor
            return last.reshape(1, -1)
    return None
