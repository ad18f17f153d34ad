"""What the first call tells: where the steps are, which tokens there are, and how much of the input is worth its cost.

Of a large input a piece is looked at: what a model's own cost allows, and never too little to tell.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from ..state import ends, mapped
from .inputs import Argument, Excerpt, ModelInputs
from .outcome import Outcome, change
from .patient import Patient
from .probes.gradients import objective

FREE = 0.3  # seconds of one forward up to which nothing is cut
SECONDS = 1.0  # of one forward and backward that are worth their while; an examination makes about twenty
ROWS = 4  # that tell rows apart
MOST_ROWS = 16  # more would cost time and tell nothing new
LARGE = 250_000  # numbers in the output of one row, from which on a few rows have to do
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


def settle(patient: Patient, run: Outcome, seconds: float) -> None:
    """Learn from the first call where the steps are, which tokens there are, and how much is worth its cost."""
    inputs = _with_vocabulary(patient, patient.inputs)
    inputs = _flattened(patient, inputs, run) if inputs.flat else _with_time(patient, inputs, run)
    patient.inputs = patient.whole = patient.given = inputs
    cut_down(patient, seconds, _enough(run))
    wanted = _fair_rows(patient, patient.inputs, _enough(run))
    if wanted is not None:
        patient.inputs = wanted
    if inputs.batched:
        axis = inputs.argument(inputs.main).rows
        patient.assumed.append(
            f"{inputs.batch} rows on axis {axis} of input{[inputs.main[0]]}; batch_axis= says otherwise"
        )


def _flattened(patient: Patient, inputs: ModelInputs, run: Outcome) -> ModelInputs:
    """Find out which are the outer ones where steps and rows share an axis: other values of one row stay in it."""
    rows = torch.arange(inputs.batch) == 0
    new = patient.run(inputs.other_rows(rows, seed=73), collect=True)
    pairs = [(a.x, b.x) for a, b in zip(run.calls, new.calls, strict=False) if a.rows == inputs.batch]
    outside = any(a.shape == b.shape and bool(change(a, b)[1:].any()) for a, b in pairs)
    patient.assumed.append(
        f"{inputs.steps} steps of {inputs.batch} rows share axis 0, as the state has {inputs.batch} rows; "
        f"{'rows' if outside else 'steps'} are the outer ones"
    )
    if not outside:
        return inputs
    sizes = (inputs.batch, inputs.steps)
    turned = mapped(
        inputs.args, lambda path, end: end.flatten(0, 1).unflatten(0, sizes) if path in inputs.flat else end
    )
    arguments = tuple(
        replace(s, rows=0, time=1 if s.time is not None else None) if s.path in inputs.flat else s
        for s in inputs.arguments
    )
    return replace(inputs, args=turned, arguments=arguments)


def _with_vocabulary(patient: Patient, inputs: ModelInputs) -> ModelInputs:
    tables = [module for module in patient.model.modules() if isinstance(module, nn.Embedding)]
    if not tables:
        return inputs
    pads = {table.padding_idx for table in tables if table.padding_idx is not None}
    return replace(
        inputs,
        vocabulary=min(table.num_embeddings for table in tables),
        pad_token=next(iter(pads)) if len(pads) == 1 else None,
    )


def _with_time(patient: Patient, inputs: ModelInputs, run: Outcome) -> ModelInputs:
    """Find the axis of time by what the layers saw; unknown where none of them saw as many steps."""
    x = inputs.get(inputs.main)
    if isinstance(x, PackedSequence):
        return inputs
    argument = inputs.argument(inputs.main)
    calls = run.calls
    if not calls:
        kinds = {layer.kind for layer in patient.seen}
        stepped = x.dim() == 2 and x.is_floating_point() and "attribute" in kinds and "loop" not in kinds
        return _without_time(inputs, argument) if x.dim() > 3 or stepped else inputs
    if inputs.batched and x.dim() == 2 and x.is_floating_point() and all(c.layer.fused and c.rows == 1 for c in calls):
        steps = calls[0].steps
        if not calls[0].batched and steps == x.shape[0] and steps > 1:
            patient.unbatched = True
            unbatched = Argument(argument.path, "sequence", None, 0, x.shape[0])
            others = tuple(unbatched if s.path == argument.path else replace(s, rows=None) for s in inputs.arguments)
            return replace(inputs, arguments=others, batch=1, batched=False, steps=x.shape[0], lengths=None)
    if not inputs.batched:
        return inputs
    once = len({c.layer.name for c in calls}) == len(calls) and all(c.steps == 1 for c in calls)
    if x.dim() == 2 and x.is_floating_point() and x.shape[1] > 1 and once:
        return _without_time(inputs, argument)  # one step of each row: its second axis are features
    if once and any(s.kind == "state" for s in inputs.arguments) and not calls[0].layer.fused:
        return _without_time(inputs, argument)  # one step from a state of the caller's: whatever else there is, no time
    if once and x.dim() == 3 and calls[0].rows == x.shape[0] * x.shape[1] and not calls[0].layer.fused:
        return _without_time(inputs, argument)  # one step of several in each row, such as agents
    steps = calls[0].steps if calls[0].layer.fused else len([c for c in calls if c.layer is calls[0].layer])
    return _on_axis(inputs, argument, x, steps)


def _on_axis(inputs: ModelInputs, argument: Argument, x: Tensor, steps: int) -> ModelInputs:
    fits = [axis for axis in range(x.dim()) if axis != argument.rows and x.shape[axis] == steps]
    if argument.time in fits or steps == inputs.batch or steps == 1:
        return inputs
    if x.dim() == 3 and fits == [2] and inputs.lengths is None:
        moved = replace(argument, time=2, steps=steps)
        arguments = tuple(moved if s.path == argument.path else s for s in inputs.arguments)
        return replace(inputs, arguments=arguments, steps=steps)
    return inputs if x.dim() <= 3 else _without_time(inputs, argument)


def _without_time(inputs: ModelInputs, argument: Argument) -> ModelInputs:
    arguments = tuple(replace(s, time=None) if s.path == argument.path else s for s in inputs.arguments)
    return replace(inputs, arguments=arguments)


def _enough(run: Outcome) -> int:
    """Return how many rows are worth their cost: a vocabulary of 50 000 at each step is a lot to keep."""
    numbers = sum(tensor.numel() for tensor in run.outputs.values())
    return ROWS if numbers > LARGE * max(1, run.inputs.batch) else MOST_ROWS


def _fair_rows(patient: Patient, inputs: ModelInputs, most: int) -> ModelInputs | None:
    """Return inputs with fewer rows, or with enough to tell rows apart; None where the given ones do, or have to."""
    if not inputs.batched or 3 <= inputs.batch <= most:
        return None
    if inputs.batch > most:
        order = torch.arange(inputs.batch)
        if inputs.lengths is not None:  # the longest row stays, so that no step is lost
            longest = int(inputs.lengths.argmax())
            order = torch.cat([order[longest : longest + 1], order[order != longest]])
        fair = inputs.select(sorted(order[:most].tolist()))
        text = f"{most} of {inputs.batch} rows were used"
    else:
        rows = [k % inputs.batch for k in range(ROWS)]
        fair = inputs.select(rows)
        fair = fair.other_rows(torch.arange(ROWS) >= inputs.batch, seed=71)
        text = f"{inputs.batch} rows do not tell rows apart: {ROWS} were used, the others with other values"
    try:
        patient.run(fair)
    except Exception:  # a model for one batch size: the rule about that will say so
        return None
    patient.assumed.append(text)
    return fair


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
    """Return the inputs with so many of its rows, in their order; of unequal lengths, long and short ones."""
    if not inputs.batched or inputs.batch <= rows:
        return inputs
    if inputs.lengths is None:
        return inputs.select(range(rows))
    order = inputs.lengths.argsort(descending=True, stable=True)
    return inputs.select(sorted(order[torch.linspace(0, inputs.batch - 1, rows).long()].tolist()))


def _with_targets(inputs: ModelInputs, targets: Any) -> ModelInputs:
    """Return the inputs with its targets as a last argument, so that rows and steps are cut from both alike."""
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
