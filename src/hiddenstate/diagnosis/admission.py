"""Admitting a patient: inputs read or invented, the first call made, axes and vocabulary learned from it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from ..cells import Layer, as_layer, invented_inputs, layers, unheard, untouched, unwrap
from ..errors import BadInput, NotRecurrent
from .arguments import read_inputs
from .budget import cut_down
from .inputs import Argument, ModelInputs, spread
from .outcome import Outcome
from .patient import Patient
from .thresholds import Thresholds

_ROWS, _STEPS = 4, 8  # of invented inputs
_MOST_ROWS = 16  # more would cost time and tell nothing new
_LARGE = 250_000  # numbers in the output of one row, from which on a few rows have to do


def admit(
    model: nn.Module, inputs: tuple[Any, ...], *, lengths: Any, batch_axis: int, thresholds: Thresholds, **more: Any
) -> Patient:
    """Return the patient, ready for its first call."""
    model = unwrap(model)
    found = layers(model)
    itself = found[0] if len(found) == 1 and found[0].module is model else None
    if itself is None and not inputs and not any(layer.fused for layer in found):
        itself = _called_a_cell(model)
    assumed: list[str] = []
    alone = itself is not None and _one_step(itself, inputs)
    if alone and itself is not None:
        model, inputs = _stepped(itself, inputs, assumed)
    elif not inputs:
        if itself is None:
            raise BadInput(
                f"hs.diagnose({type(model).__name__}) was given no inputs. They can be invented for a cell or a torch "
                f"layer by itself; a whole model wants them: hs.diagnose(model, x)."
            )
        inputs, batch_axis = _invented_sequence(itself, assumed)
    read = read_inputs(model, inputs, batch_axis=batch_axis, lengths=lengths)
    return Patient(model, read, thresholds, assumed=assumed, alone=alone, **more)


def _called_a_cell(model: nn.Module) -> Layer | None:
    """Return a module that does not look like a cell, but is given alone, as a cell must be."""
    try:
        return as_layer(model)
    except NotRecurrent:
        return None


def _one_step(layer: Layer, inputs: tuple[Any, ...]) -> bool:
    """Whether the model is a cell, and is to be stepped along a sequence."""
    if layer.fused:
        return False
    if not inputs:
        return True
    x = inputs[0]
    if isinstance(x, PackedSequence):
        return False
    if not isinstance(x, Tensor) or x.dim() <= (2 if x.is_floating_point() else 1):
        return True
    if layer.kind != "cell":
        return True
    try:
        with untouched(layer.module), unheard(), torch.no_grad():
            layer.module(*inputs)
    except Exception:  # it takes one step at a time, so it is given one
        return True
    return False


def _stepped(layer: Layer, inputs: tuple[Any, ...], assumed: list[str]) -> tuple[nn.Module, tuple[Any, ...]]:
    module = layer.module
    if not inputs:
        x = _sequence_for(layer)
        assumed.append(f"no input was given: the cell was stepped along an invented one of shape {tuple(x.shape)}")
        return Stepped(module), (x,)
    x, *state = inputs
    step_axes = 2 if x.is_floating_point() else 1
    if x.dim() > step_axes:
        return Stepped(module), (x, *state)
    rows = x if x.dim() == step_axes else x[None]
    generator = torch.Generator().manual_seed(0)
    if x.is_floating_point():
        noise = torch.randn(len(rows), _STEPS, *rows.shape[1:], generator=generator, dtype=torch.float64).to(x)
        steps = spread(x) * noise
        steps[:, 0] = rows
    else:
        top = max(2, int(rows.max()) + 1)
        steps = torch.randint(top, (len(rows), _STEPS), generator=generator).to(x)
        steps[:, 0] = rows
    assumed.append(f"one step was given: the cell was stepped along a sequence of {_STEPS} that begins with it")
    if x.dim() < step_axes:
        state = []  # without rows, as the step was: the cell's own first state has them
    return Stepped(module), (steps, *state)


def _sequence_for(layer: Layer) -> Tensor:
    """Return an invented sequence that the cell takes."""
    module = layer.module
    for x in invented_inputs(module, _ROWS, _STEPS):
        if _takes(module, x):
            return x
    raise BadInput(
        f"no input could be invented for {type(module).__name__}: give it one, hs.diagnose(cell, x), "
        f"or let the cell say its input_size."
    )


def _takes(module: nn.Module, x: Tensor) -> bool:
    try:
        with untouched(module), unheard(), torch.no_grad():
            as_layer(module, sample=x[:, 0])
            Stepped(module)(x)
    except Exception:  # a trial
        return False
    return True


def _invented_sequence(layer: Layer, assumed: list[str]) -> tuple[tuple[Any, ...], int]:
    first = layer.spec.batch_first
    x = next(invented_inputs(layer.module, *((_ROWS, _STEPS) if first else (_STEPS, _ROWS))))
    assumed.append(f"no input was given: one of shape {tuple(x.shape)} was invented")
    return (x,), 0 if first else 1


def settle(patient: Patient, run: Outcome, seconds: float) -> None:
    """Learn from the first call where the steps are, which tokens there are, and how much is worth its cost."""
    inputs = patient.inputs
    inputs = _with_vocabulary(patient, inputs)
    inputs = _with_time(patient, inputs, run)
    patient.inputs = patient.whole = inputs
    cut_down(patient, seconds, _enough(run))
    wanted = _fair_rows(patient, patient.inputs, _enough(run))
    if wanted is not None:
        patient.inputs = wanted
    if inputs.batched:
        axis = inputs.argument(inputs.main).rows
        patient.assumed.append(
            f"{inputs.batch} rows on axis {axis} of input{[inputs.main[0]]}; batch_axis= says otherwise"
        )


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
        return inputs if x.dim() <= 3 else _without_time(inputs, argument)
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
    return _ROWS if numbers > _LARGE * max(1, run.inputs.batch) else _MOST_ROWS


def _fair_rows(patient: Patient, inputs: ModelInputs, most: int) -> ModelInputs | None:
    """Return the call with no more rows than needed, or with enough to tell them apart, where the model takes it."""
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
        rows = [k % inputs.batch for k in range(_ROWS)]
        fair = inputs.select(rows)
        fair = fair.other_rows(torch.arange(_ROWS) >= inputs.batch, seed=71)
        text = f"{inputs.batch} rows do not tell rows apart: {_ROWS} were used, the others with other values"
    try:
        patient.run(fair)
    except Exception:  # a model for one batch size: the rule about that will say so
        return None
    patient.assumed.append(text)
    return fair


class Stepped(nn.Module):
    """Calls a cell once for each step of `x (batch, time, ...)`; returns outputs `(batch, time, ...)` and the state."""

    def __init__(self, cell: nn.Module) -> None:
        """Take the cell as it is."""
        super().__init__()
        self.cell = cell

    def forward(self, x: Tensor, state: Any = None) -> tuple[Tensor, Any]:
        """Return what the cell gave at each step, and its last state."""
        layer = as_layer(self.cell, sample=x[:, 0])
        native = layer.to_native(layer.initial(len(x))) if state is None else state
        outputs = []
        for x_t in x.unbind(1):
            output, native = layer.split(self.cell(x_t, native))
            outputs.append(output)
        return torch.stack(outputs, dim=1), native
