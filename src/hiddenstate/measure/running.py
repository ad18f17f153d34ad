"""Running a layer along a batch-first sequence, whatever its own layout, with gradients."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ..cells import Layer, layers, unwrap
from ..errors import BadInput
from ..unrolling import Recurrent, unroll


def itself_a_layer(model: nn.Module) -> Layer | None:
    """Return the model as a layer where it is one itself, rather than holding some."""
    found = layers(model) if isinstance(model, nn.Module) else []
    return found[0] if len(found) == 1 and found[0].module is unwrap(model) else None


def run_layer(layer: Layer, x: Tensor, lengths: Tensor | None = None) -> Tensor:
    """Return the outputs of a layer, (batch, time, unit), for `x (batch, time, feature)`."""
    if not layer.fused:
        return _run_cell(layer, x)
    spec = layer.spec
    if lengths is not None and spec.bidirectional:
        # A reverse direction begins at the last real step, and must not read what lies behind it.
        return unroll(layer.module, x, lengths=lengths.clamp(min=1), engine="loop")[0]
    options = {"engine": "loop"} if isinstance(layer.module, Recurrent) else {}
    # Not module(...): hooks that watch the user's own runs should not see this one.
    output = tensor_of(layer.split(layer.module.forward(x if spec.batch_first else x.transpose(0, 1), **options))[0])
    return output if spec.batch_first else output.transpose(0, 1)


def _run_cell(layer: Layer, x: Tensor) -> Tensor:
    native = layer.to_native(layer.initial(len(x)))
    outputs = []
    for step in x.unbind(1):  # not x[:, t]: the backward of each slice would be as large as x
        output, native = layer.split(layer.module.forward(step, native))
        outputs.append(tensor_of(output).flatten(1))
    return torch.stack(outputs, dim=1)


def tensor_of(output: Any) -> Tensor:
    """Return the tensor in what a model returned: itself, the first of a tuple, or the usual entry of a mapping."""
    if isinstance(output, Tensor):
        return output
    if isinstance(output, tuple | list) and output:
        return tensor_of(output[0])
    for name in ("logits", "last_hidden_state", "output"):
        found = output.get(name) if isinstance(output, dict) else getattr(output, name, None)
        if isinstance(found, Tensor):
            return found
    raise BadInput(
        f"the model returned {type(output).__name__}, in which no output tensor was recognized: "
        f"give output=, a function that takes what the model returns and gives a tensor."
    )
