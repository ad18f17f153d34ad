"""Where a gradient to the input begins: at the input itself, or at the embedding of its tokens."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import BadInput


class Leaf:
    """The tensor that gradients are taken to, batch and time at its first two axes."""

    def __init__(self, x: Tensor, valid: Tensor, *, time_axis: int) -> None:
        """Make the leaf where `x` is real numbers; tokens get theirs when the model embeds them."""
        self.time_axis = time_axis
        self.tensor: Tensor | None = None
        self.x = x.detach()
        if x.is_floating_point() or x.is_complex():
            padding = ~(valid if time_axis == 1 else valid.T)
            # What padding holds may be NaN, and zero times NaN in a backward is NaN.
            self.x = self.x.masked_fill(padding.reshape(*padding.shape, *[1] * (x.dim() - 2)), 0).requires_grad_()
            self.tensor = self.x
        self._turned = time_axis == 0

    @contextmanager
    def planted(self, model: nn.Module) -> Iterator[None]:
        """Watch the model's embeddings, and make the leaf the output of the first that is given the tokens."""
        if self.tensor is not None:
            yield
            return
        hooks = [m.register_forward_hook(self._plant) for m in model.modules() if isinstance(m, nn.Embedding)]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def _plant(self, module: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor | None:
        tokens = args[0] if args else None
        if self.tensor is not None or not isinstance(tokens, Tensor) or tokens.numel() != self.x.numel():
            return None
        if tokens.shape == self.x.shape and torch.equal(tokens, self.x):
            turned = self._turned
        elif tokens.T.shape == self.x.shape and torch.equal(tokens.T, self.x):
            turned = not self._turned
        else:
            return None
        self._turned = turned
        self.tensor = output.detach().requires_grad_()
        return self.tensor

    def found(self) -> Tensor:
        """Return the leaf, or say why there is none."""
        if self.tensor is None:
            raise BadInput(
                f"the input is {self.x.dtype}, so its gradient begins at an embedding, but no nn.Embedding of this "
                f"model was called with it. Give the model real numbers (one-hot or embedded), or an nn.Embedding."
            )
        return self.tensor

    def squares(self, gradient: Tensor) -> Tensor:
        """Return the squared size of a gradient at each step: (batch, time)."""
        steps = gradient.abs().flatten(2).square().sum(2) if gradient.dim() > 2 else gradient.abs().square()
        return steps.T if self._turned else steps
