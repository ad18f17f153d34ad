"""How much of a large input is looked at: what a model's own cost allows, and never too little to tell."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from ..state import ends
from .inputs import Argument, Excerpt, ModelInputs
from .patient import Patient
from .probes.parameters import objective

FREE = 0.3  # seconds of one forward up to which nothing is cut
SECONDS = 1.0  # of one forward and backward that are worth their while; an examination makes about twenty
ROWS = 4  # that tell rows apart
STEPS = 32  # that a cut leaves at least
SHORT = 64  # steps up to which a sequence is not cut

T = TypeVar("T")


def timed(run: Callable[[], T]) -> tuple[T, float]:
    """Return what `run` gives, and the seconds it took."""
    began = time.perf_counter()
    result = run()
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.synchronize()
    return result, time.perf_counter() - began


def cut_down(patient: Patient, seconds: float, most: int) -> bool:
    """Give a patient whose forward took `seconds` a piece of its input, where the whole would cost too much.

    `most` rows are enough for any model. A piece is tried first: a model of fixed length keeps all its steps, and a
    loss whose targets cannot be cut along keeps the whole input.
    """
    whole = patient.inputs
    enough = min(whole.batch, most)
    if seconds <= FREE or (whole.steps <= SHORT and enough <= ROWS):
        return False
    joined = _with_targets(whole, patient.targets)
    few = _some_rows(joined, ROWS)
    for shorten, least in _ways(whole):
        trial = _trial(patient, shorten(few, least))
        if trial is None:
            continue
        took, fits = trial
        steps = min(whole.steps, max(least, int(least * SECONDS / took)))
        rows = min(enough, max(ROWS, int(ROWS * SECONDS * least / (took * steps))))
        if steps == whole.steps and rows == enough:
            return False
        _take(patient, shorten(_some_rows(joined, rows), steps), with_targets=fits)
        return True
    return False


def _ways(inputs: ModelInputs) -> Iterator[tuple[Callable[[ModelInputs, int], ModelInputs], int]]:
    """Yield how steps may be cut, and how far: of all sequences, of those as long as the main one, or not at all."""
    if inputs.steps > SHORT and inputs.argument(inputs.main).time is not None:
        yield ModelInputs.shortened, STEPS
        yield lambda piece, steps: piece.shortened(steps, others=False), STEPS
    yield lambda piece, _: piece, inputs.steps


def _some_rows(inputs: ModelInputs, rows: int) -> ModelInputs:
    """Return the call with so many of its rows, in their order; of unequal lengths, long and short ones."""
    if not inputs.batched or inputs.batch <= rows:
        return inputs
    if inputs.lengths is None:
        return inputs.select(range(rows))
    order = inputs.lengths.argsort(descending=True, stable=True)
    return inputs.select(sorted(order[torch.linspace(0, inputs.batch - 1, rows).long()].tolist()))


def _with_targets(inputs: ModelInputs, targets: Any) -> ModelInputs:
    """Return the call with its targets as a last argument, so that rows and steps are cut from both alike."""
    place, argument = len(inputs.args), inputs.argument(inputs.main)
    arguments = []
    for path, end in ends(targets, (place,)):
        rows = time_axis = None
        if isinstance(end, Tensor) and inputs.batched:
            axes = [axis for axis in (argument.rows or 0, 0, 1) if axis < end.dim() and end.shape[axis] == inputs.batch]
            rows = axes[0] if axes else None
        if isinstance(end, Tensor) and rows in (0, 1) and end.dim() > 1 and end.shape[1 - rows] == inputs.steps:
            time_axis = 1 - rows
        arguments.append(Argument(path, "sequence", rows, time_axis, inputs.steps if time_axis is not None else 0))
    return replace(inputs, args=(*inputs.args, targets), arguments=(*inputs.arguments, *arguments))


def _parted(piece: ModelInputs) -> tuple[ModelInputs, Any]:
    *args, targets = piece.args
    arguments = tuple(argument for argument in piece.arguments if argument.path[0] < len(args))
    return replace(piece, args=tuple(args), arguments=arguments), targets


def _trial(patient: Patient, piece: ModelInputs) -> tuple[float, bool] | None:
    """Return the seconds of one forward and backward, and whether the loss takes the piece too; None: nothing does."""
    before = patient.inputs, patient.targets, patient.loss
    patient.inputs, patient.targets = _parted(piece)
    losses = [patient.loss, None] if patient.loss is not None else [None]
    try:
        for loss in losses:
            patient.loss = loss
            # Any failure is an answer: a model of fixed length refuses, and that is its right.
            with contextlib.suppress(Exception):
                return timed(lambda: _forward_and_backward(patient))[1], loss is before[2]
        return None
    finally:
        patient.inputs, patient.targets, patient.loss = before


def _forward_and_backward(patient: Patient) -> None:
    total = objective(patient, patient.run(grad=True))
    wanted = [p for p in patient.model.parameters() if p.requires_grad]
    if total is not None and wanted:
        torch.autograd.grad(total, wanted, allow_unused=True)


def _take(patient: Patient, piece: ModelInputs, *, with_targets: bool) -> None:
    whole = patient.inputs
    patient.inputs, targets = _parted(piece)
    if with_targets:
        patient.whole, patient.targets = patient.inputs, targets
    patient.excerpt = Excerpt(piece.batch, whole.batch, piece.steps, whole.steps)
    alone = "" if with_targets else ", and again with the loss"
    patient.assumed.append(f"the whole input was run once{alone}; all else was {patient.excerpt}")
