"""The device and dtype of a module's weights."""

from __future__ import annotations

import torch
from torch import Tensor, nn


def weights_like(module: nn.Module) -> tuple[torch.device, torch.dtype]:
    """Return the device and dtype of a module's weights, for states that should match them."""
    for store in ("_parameters", "_buffers"):
        if (tensor := _first(module, store, set())) is not None:
            return tensor.device, tensor.dtype
    return torch.get_default_device(), torch.get_default_dtype()


def _first(module: nn.Module, store: str, seen: set[nn.Module]) -> Tensor | None:
    """Return the first floating-point tensor that a module holds; each step asks, and `parameters()` is slower."""
    tensor: Tensor | None
    for tensor in getattr(module, store).values():
        if tensor is not None and (tensor.is_floating_point() or tensor.is_complex()):
            return tensor
    seen.add(module)  # modules may hold each other
    within = (
        _first(child, store, seen) for child in module._modules.values() if child is not None and child not in seen
    )
    return next((tensor for tensor in within if tensor is not None), None)
