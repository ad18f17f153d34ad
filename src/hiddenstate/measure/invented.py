"""Made-up inputs for a measure that was given none: random numbers or tokens that the model accepts."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ..cells import as_layer, invented_inputs, layers, unwrap_to_call
from ..errors import BadInput, HiddenStateError
from .system import at_rest


def invented(model: nn.Module, rows: int, steps: int, *, time_axis: int) -> Tensor:
    """Return the first made-up input that the model can be called with: (rows, steps, ...), or with time first."""
    if min(rows, steps) < 1:
        raise BadInput(f"{rows} trials of {steps} steps are asked for, but there is at least one of each.")
    model = unwrap_to_call(model)
    found = layers(model)
    width = found[0].spec.input_size if len(found) == 1 and found[0].module is model else None
    if width is not None:  # the model is a layer, which says its input size
        like = next(model.parameters(), torch.zeros(()))
        x = next(x for x in invented_inputs(model, rows, steps) if x.shape[2:] == (width,)).to(like.dtype)
        return x.transpose(0, 1) if time_axis == 0 else x
    for x in invented_inputs(model, rows, steps):
        given = x.transpose(0, 1) if time_axis == 0 else x
        try:
            with at_rest(model), torch.no_grad():
                _called(model, given, x)
        except Exception:  # another size may work
            continue
        return given
    raise BadInput(f"no input could be made up that {type(model).__name__} takes: give x.")


def _called(model: nn.Module, given: Tensor, x: Tensor) -> None:
    try:
        model(given)
    except Exception:
        try:
            layer = as_layer(model, x[:, 0])
        except HiddenStateError:
            layer = None
        if layer is None or layer.fused:
            raise
        layer.call(x[:, 0], layer.to_native(layer.initial(len(x))))  # a cell, with one step of its input
