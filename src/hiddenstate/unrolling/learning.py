"""A cell as a layer: a real step of the call teaches what its state looks like."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from .._torch_names import lookup
from ..cells import Layer, as_layer
from .holding import held_tensors, put_in

_transforms = lookup("torch._C._functorch.peek_interpreter_stack")
_is_wrapped = lookup("torch._C._functorch.is_functorch_wrapped_tensor")
_untransformed = lookup("torch._functorch.pyfunctorch.temporarily_clear_interpreter_stack")


def layer_for(cell: nn.Module, x: Any) -> Layer:
    """Return a cell as a layer; a real step teaches what its state looks like."""
    if not isinstance(x, Tensor) or x.dim() < 2 or x.shape[1] == 0:
        return as_layer(cell)
    if not (_transforms and _untransformed and _transforms() is not None):
        return as_layer(cell, x[:, 0])
    # Within a transform of torch.func no tensor has numbers of its own: the step is made up, outside of it, and so are
    # weights that the transform has taken hold of, as it does those of an ensemble.
    step = _like(x[:, 0])
    held = [place.tensor for place in held_tensors(cell)]
    makers = [_like(tensor) if _is_wrapped is None or _is_wrapped(tensor) else None for tensor in held]
    with _untransformed():
        own = [tensor if make is None else make() for tensor, make in zip(held, makers, strict=True)]
        with put_in(cell, own):
            return as_layer(cell, step())


def _like(tensor: Tensor) -> Callable[[], Tensor]:
    """Return what makes up a tensor of this shape; numbers differ, so that nothing looks like something else."""
    shape, dtype, device = tensor.shape, tensor.dtype, tensor.device
    return lambda: torch.linspace(0, 1, shape.numel()).view(shape).to(device, dtype)
