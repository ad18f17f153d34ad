"""cuDNN one layer at a time: weights in its own order, and dropout between layers."""

from __future__ import annotations

import torch
from torch import Tensor

from .kernel_call import KernelCall

_MODES = {"rnn_relu": 0, "rnn_tanh": 1, "lstm": 2, "gru": 3}
_generators: dict[torch.device, torch.Generator] = {}


def takes(call: KernelCall) -> bool:
    """Say whether torch hands this call to cuDNN."""
    return call.data.is_cuda and bool(torch.backends.cudnn.is_acceptable(call.data))  # type: ignore[no-untyped-call]


def flattened(call: KernelCall, layer: int) -> list[Tensor]:
    """Return one layer's weights as copies that lie as cuDNN wants them; gradients reach the originals.

    A layer's weights inside those of a stack do not lie as they would in a layer of its own, and cuDNN would warn.
    """
    copies = [weight.clone() for weight in call.weights(layer)]
    hidden = call.weights(layer)[1].shape[0] // (4 if call.kind == "lstm" else 3 if call.kind == "gru" else 1)
    each = len(copies) // call.directions
    projected = each in (3, 5)
    unit = copies[each - 1].shape[0] if projected else 0
    with torch.no_grad():
        torch._cudnn_rnn_flatten_weight(
            copies, each, copies[0].shape[1], _MODES[call.kind], hidden, unit, 1, False, call.bidirectional
        )
    return copies


def dropout(x: Tensor, p: float) -> Tensor:
    """Drop entries as cuDNN does between its layers: apart from torch's random stream, which stays as it is."""
    source = _generators.get(x.device)
    if source is None:
        source = _generators[x.device] = torch.Generator(x.device).manual_seed(torch.cuda.initial_seed())
    with torch.no_grad():
        mask = torch.empty_like(x).bernoulli_(1 - p, generator=source).div_(1 - p) if p < 1 else torch.zeros_like(x)
    return x * mask
