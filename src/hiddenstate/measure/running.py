"""Running a layer along a batch-first sequence, whatever its own layout, with gradients."""

from __future__ import annotations

import inspect

import torch
from torch import Tensor, nn

from ..cells import Call, Layer, as_layer, layers, unwrap
from ..unrolling import Recurrent, unroll
from .outputs import tensor_of


def itself_a_layer(model: nn.Module, x: Tensor) -> Layer | None:
    """Return the model as a layer where it is one itself, rather than holding some."""
    found = layers(model)
    sample = x[:, 0] if x.numel() else None
    if (len(found) == 1 and found[0].module is unwrap(model)) or _needs_state(model):
        return as_layer(model, sample)
    return None


def _needs_state(model: nn.Module) -> bool:
    # A cell made of torch's cells looks like a model that holds them, but cannot be called with x alone.
    parameters = list(inspect.signature(type(model).forward).parameters.values())[1:]
    needed = [p for p in parameters if p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD]
    return len(needed) == 2 and (hasattr(model, "hidden_size") or hasattr(model, "initial_state"))


def run_layer(layer: Layer, x: Tensor, lengths: Tensor) -> Tensor:
    """Return the outputs of a layer, (batch, time, unit), for `x (batch, time, feature)`."""
    if not layer.fused:
        return _run_cell(layer, x)
    spec = layer.spec
    if spec.bidirectional and bool((lengths < x.shape[1]).any()):
        # A reverse direction begins at the last real step, and must not read what lies behind it.
        return unroll(layer.module, x, lengths=lengths.clamp(min=1), engine="loop")[0]
    options = {"engine": "loop"} if isinstance(layer.module, Recurrent) else {}
    given = x if spec.batch_first else x.transpose(0, 1)
    return Call(layer, (given,), result=layer.module(given, **options)).output


def _run_cell(layer: Layer, x: Tensor) -> Tensor:
    native = layer.to_native(layer.initial(len(x)))
    outputs = []
    for step in x.unbind(1):  # not x[:, t]: the backward of each slice would be as large as x
        output, native = layer.split(layer.module(step, native))
        outputs.append(tensor_of(output).flatten(1))
    return torch.stack(outputs, dim=1)
