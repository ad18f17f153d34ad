"""A cell or layer given by itself: recognized by its arguments, and stepped along a given or invented sequence."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from ..cells import Layer, as_layer, gathered, invented_inputs, layers, taken_by_position, unheard, untouched
from ..errors import BadInput, NotRecurrent
from ..state import ends
from .inputs import spread

_ROWS, _STEPS = 4, 8  # of invented inputs


def the_model_itself(model: nn.Module, *, given: bool) -> Layer | None:
    """Return the model as a layer or cell, where it is one."""
    found = layers(model)
    if len(found) == 1 and found[0].module is model:
        return found[0]
    return None if given or any(layer.fused for layer in found) else _called_a_cell(model)


def handed_a_state(model: nn.Module, inputs: tuple[Any, ...]) -> Layer | None:
    """Return the model as a cell, where it is handed one step and a state, whatever it calls them."""
    if len(inputs) != 2 or not isinstance(inputs[0], Tensor) or inputs[0].dim() != 2 or layers(model):
        return None
    parts = [end for _, end in ends(inputs[1])]
    fits = all(isinstance(end, Tensor) and end.is_floating_point() and end.dim() > 1 for end in parts)
    return _called_a_cell(model) if fits and all(len(end) == len(inputs[0]) for end in parts) else None


def insists_on_a_state(model: nn.Module, inputs: tuple[Any, ...]) -> Layer | None:
    """Return the model as a cell, where it takes one step and a state, whatever it calls it, and is handed no state."""
    if len(inputs) != 1 or not isinstance(inputs[0], Tensor) or inputs[0].dim() != 3 or layers(model):
        return None
    if [p.default for p in taken_by_position(model).values()] != [inspect.Parameter.empty] * 2:
        return None
    return as_layer(model, sample=inputs[0][:, 0]) if _takes(model, inputs[0]) else None


def _called_a_cell(model: nn.Module) -> Layer | None:
    """Return a module as a cell, where it can be one though it does not look like it; None where it cannot."""
    try:
        return as_layer(model)
    except NotRecurrent:
        return None


def takes_one_step(layer: Layer, inputs: tuple[Any, ...]) -> bool:
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
            state = layer.to_state(layer.split(layer.module(*inputs))[1], batch=len(x))
            first = layer.initial(len(x))
    except Exception:  # it takes one step at a time, so it is given one
        return True
    # Numbers may add up over the rows and steps of a sequence, but what comes out is no state then.
    return any(part.shape != first[name].shape for name, part in state.items())


def stepped(
    layer: Layer, inputs: tuple[Any, ...], assumed: list[str], *, time_axis: int
) -> tuple[nn.Module, tuple[Any, ...]]:
    """Return a model that steps a cell along a sequence, and what it is called with: as given, or made longer."""
    if not inputs:
        x = _sequence_for(layer)
        assumed.append(f"no input was given: the cell was stepped along an invented one of shape {tuple(x.shape)}")
        return Stepped(gathered(layer.module)), (x,)
    x, *state = inputs
    step_axes = 2 if x.is_floating_point() else 1
    module = gathered(layer.module)
    if module is not layer.module and state:
        state = [tuple(state)]
    if x.dim() > step_axes:
        return Stepped(module, time_axis), (x, *state)
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


def invented_sequence(layer: Layer, assumed: list[str]) -> tuple[tuple[Any, ...], int]:
    """Return a sequence that a layer takes, and where its rows are."""
    first = layer.spec.batch_first
    x = next(invented_inputs(layer.module, *((_ROWS, _STEPS) if first else (_STEPS, _ROWS))))
    assumed.append(f"no input was given: one of shape {tuple(x.shape)} was invented")
    return (x,), 0 if first else 1


class Stepped(nn.Module):
    """Calls a cell once for each step of `x (batch, time, ...)`; returns outputs `(batch, time, ...)` and the state."""

    def __init__(self, cell: nn.Module, time_axis: int = 1) -> None:
        """Take the cell as it is; with `time_axis=0` inputs and outputs are (time, batch, ...)."""
        super().__init__()
        self.cell, self.time_axis = cell, time_axis

    def forward(self, x: Tensor, state: Any = None) -> tuple[Tensor, Any]:
        """Return what the cell gave at each step, and its last state."""
        layer = as_layer(self.cell, sample=x.select(self.time_axis, 0))
        native = layer.to_native(layer.initial(x.shape[1 - self.time_axis])) if state is None else state
        outputs = []
        for x_t in x.unbind(self.time_axis):
            output, native = layer.call(x_t, native)
            outputs.append(output)
        return torch.stack(outputs, dim=self.time_axis), native
