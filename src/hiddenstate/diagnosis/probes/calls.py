"""The plain call, its variations (made again, with other seeds, a row or a step less), and the axes of its output."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from ...state import Path, mapped, tensors
from ..inputs import ModelInputs
from ..outcome import Outcome, gap, same
from ..patient import Patient, PatientProbe, held_tensors


class PlainCall(Outcome, PatientProbe):
    """The model called in eval mode as the user calls it, with the calls of all its layers."""

    @classmethod
    def measure(cls, patient: Patient) -> PlainCall:
        """Call the model once."""
        return cls.of(patient.run(collect=True))


class TracedCall(Outcome, PatientProbe):
    """The plain call with every operation written down."""

    @classmethod
    def measure(cls, patient: Patient) -> TracedCall:
        """Call the model once, traced; torch may take other kernels then, which differ in their last bits."""
        return cls.of(patient.run(trace=True, collect=True))


@dataclass(frozen=True, slots=True, eq=False)
class FewerRows(PatientProbe):
    """The plain call with one row less."""

    outcome: Outcome | None  # None where there is no row to leave out, or the model refuses

    @classmethod
    def measure(cls, patient: Patient) -> FewerRows:
        """Leave out the last row."""
        inputs = patient.inputs
        if not inputs.batched or inputs.batch < 2:
            return cls(None)
        return cls(attempt(patient, inputs.select(range(inputs.batch - 1))))


def attempt(patient: Patient, inputs: ModelInputs) -> Outcome | None:
    """Call the model with other inputs; None where it does not take them."""
    try:
        return patient.run(inputs, collect=True)
    except Exception:  # a trial: a model of fixed length refuses, and that is its right
        return None


@dataclass(frozen=True, slots=True, eq=False)
class RepeatedCall(PatientProbe):
    """Two calls with the same input and seed, one after the other."""

    gap: float  # the largest difference between their outputs, relative to their size
    changed: dict[str, Tensor]  # attributes that hold another tensor after the calls than before
    reset: str = ""  # the method after which a third call gives what the first gave, "" where none does
    tried: str = ""  # a method that is called like one that does, and does not

    @classmethod
    def measure(cls, patient: Patient) -> RepeatedCall:
        """Call the model twice in eval mode, without putting anything back in between; then once after a reset."""
        before = held_tensors(patient.model)
        values = {name: (t, t.detach().clone()) for name, t in before.items()}
        plain = _numbers(patient.model)
        with patient.afresh():
            first = patient.call()
            # The first result may be a tensor that the second call writes into.
            copies = mapped(first.result, lambda _, end: end.detach().clone() if isinstance(end, Tensor) else end)
            first = Outcome(copies, first.inputs, first.calls, first.trace)
            second = patient.call()
            after, moved = held_tensors(patient.model), _numbers(patient.model)
            apart = gap(first, second)
            if apart == 0 and patient.inputs.batched:  # the same again may be what an average of both gives
                rows = torch.ones(patient.inputs.batch, dtype=torch.bool)
                patient.call(patient.inputs.other_rows(rows, seed=19))
                apart = gap(first, patient.call())
            third = patient.call_after_reset() if apart > 0 and patient.resets else None
        changed = {name: t for name, t in after.items() if name not in before or before[name] is not t}
        changed.update(
            {name: after[name] for name, (t, old) in values.items() if after.get(name) is t and not same(t, old)}
        )
        changed.update({name: torch.tensor(value) for name, value in moved.items() if plain.get(name) != value})
        name = next(iter(patient.resets), "")
        back = third is not None and gap(first, third) == 0
        return cls(apart, changed, name if back else "", "" if back or third is None else name)


def _numbers(model: nn.Module) -> dict[str, float]:
    """Return all numbers that a model holds in plain attributes, by the name one would write."""
    found = ((prefix, module.__dict__) for prefix, module in model.named_modules())
    return {
        f"{prefix}.{name}" if prefix else name: value
        for prefix, held in found
        for name, value in held.items()
        if type(value) in (int, float)
    }


@dataclass(frozen=True, slots=True, eq=False)
class OtherSeed(PatientProbe):
    """Two calls in eval mode with different seeds."""

    first: Outcome
    second: Outcome
    gap: float  # the largest difference between their outputs, relative to their size

    @classmethod
    def measure(cls, patient: Patient) -> OtherSeed:
        """Call the model with two seeds, neither of them traced: a trace would change the last bits of one."""
        first, second = patient.run(number=0, collect=True), patient.run(number=1, collect=True)
        return cls(first, second, gap(first, second))


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


def finals(patient: Patient, run: Outcome) -> list[Tensor]:
    """Return all outputs of each row, at its last real step: (batch, entries) each; the main one first.

    What a layer ended in counts where there is nothing else.
    """
    layout = patient[OutputLayout]
    if not patient.inputs.batched:
        leaves = [leaf for leaf in layout.leaves if not leaf.state and leaf.path in run.outputs][:1]
        found = [(run.outputs[leaf.path], leaf.time) for leaf in leaves]
        return [(t.movedim(time, 0)[-1] if time is not None else t).reshape(1, -1) for t, time in found]
    leaves = [leaf for leaf in layout.leaves if leaf.rows is not None]
    leaves = [leaf for leaf in leaves if not leaf.state] or leaves[:1]
    return [_at_the_end(patient, run, leaf) for leaf in leaves if leaf.path in run.outputs]


def _at_the_end(patient: Patient, run: Outcome, leaf: OutputTensor) -> Tensor:
    rows = by_rows(run.outputs[leaf.path], leaf, run.inputs.batch)
    if leaf.stepwise:
        last = run.inputs.last.clamp(max=rows.shape[1] - 1)
        if patient.inputs.steps != rows.shape[1] and patient.inputs.lengths is None:
            last = torch.full((len(rows),), rows.shape[1] - 1)
        rows = rows[torch.arange(len(rows)), last]
    return rows.reshape(len(rows), -1)
