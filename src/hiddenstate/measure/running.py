"""Running a layer along a batch-first sequence, whatever its own layout, with gradients."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from ..cells import Layer, layers, unwrap
from ..errors import BadInput


def itself_a_layer(model: nn.Module) -> Layer | None:
    """Return the model as a layer where it is one itself, rather than holding some."""
    found = layers(model) if isinstance(model, nn.Module) else []
    return found[0] if len(found) == 1 and found[0].module is unwrap(model) else None


def run_layer(layer: Layer, x: Tensor, lengths: Tensor | None = None) -> Tensor:
    """Return the outputs of a layer, (batch, time, unit), for `x (batch, time, feature)`."""
    if not layer.fused:
        return _run_cell(layer, x)
    first = layer.spec.batch_first
    if lengths is not None and isinstance(layer.module, nn.RNNBase) and layer.module.bidirectional:
        # A reverse direction begins at the last real step, which only a packed sequence tells it.
        packed = pack_padded_sequence(x, lengths.clamp(min=1).cpu(), batch_first=True, enforce_sorted=False)
        padded: Tensor = pad_packed_sequence(layer.module(packed)[0], batch_first=True, total_length=x.shape[1])[0]
        return padded
    output = layer.split(layer.module(x if first else x.transpose(0, 1)))[0]
    output = output if first else output.transpose(0, 1)
    return tensor_of(output)


def _run_cell(layer: Layer, x: Tensor) -> Tensor:
    native = layer.to_native(layer.initial(len(x)))
    outputs = []
    for step in x.unbind(1):  # not x[:, t]: the backward of each slice would be as large as x
        output, native = layer.split(layer.module(step, native))
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
