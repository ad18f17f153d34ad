"""Where a gradient to the input begins: at the input itself, or at the embedding of its tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from ..cells import Arguments, around
from ..errors import BadInput


class Leaf:
    """The input of a model, and the tensors in it that gradients are taken to.

    For real numbers that is the input itself. Tokens have no gradient: theirs begins at what the model's first
    `nn.Embedding` makes of them, be it all at once, or step by step in a loop.
    """

    def __init__(self, x: Tensor, valid: Tensor, *, time_axis: int) -> None:
        """Take the input, with its time axis at 0 or 1 and `valid (batch, time)` saying which steps are real."""
        self.x = x.detach()
        self._by_row = time_axis == 1  # whether rows come before steps in what the gradients are taken to
        self._starts: list[Tensor] = []
        self._steps = False  # whether there is one start for each step
        if x.is_floating_point() or x.is_complex():
            padding = ~(valid if time_axis == 1 else valid.T)
            # What padding holds may be NaN, and zero times NaN in a backward is NaN.
            self.x = self.x.masked_fill(padding.reshape(*padding.shape, *[1] * (x.dim() - 2)), 0).requires_grad_()
            self._starts = [self.x]

    @contextmanager
    def planted(self, model: nn.Module) -> Iterator[None]:
        """Watch the model's embeddings for the tokens."""
        embeddings = [] if self._starts else [m for m in model.modules() if isinstance(m, nn.Embedding)]
        handles = [around(embedding, self._plant) for embedding in embeddings]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def squares(self, y: Tensor) -> Tensor:
        """Return the squared size of dy/dx for a scalar y, at each row and step: (batch, time)."""
        starts = self._found()
        found = torch.autograd.grad(y, starts, retain_graph=True, allow_unused=True)
        sizes = [torch.zeros_like(s) if g is None else g for s, g in zip(starts, found, strict=True)]
        if self._steps:
            rows = self.x.shape[0 if self._by_row else 1]
            steps = [size.abs().double().square().reshape(rows, -1).sum(1) for size in sizes]
            missing = [torch.zeros_like(steps[0])] * (self.x.shape[1 if self._by_row else 0] - len(steps))
            return torch.stack(steps + missing, dim=1)
        steps_of = sizes[0].abs().double().square()  # a double: squares of small numbers need its range
        steps_of = steps_of.flatten(2).sum(2) if steps_of.dim() > 2 else steps_of
        return steps_of if self._by_row else steps_of.T

    def _found(self) -> list[Tensor]:
        if not self._starts:
            raise BadInput(
                f"the input is {self.x.dtype}, so its gradient begins at an embedding, but no nn.Embedding of this "
                f"model was called with it. Give the model real numbers (one-hot or embedded), or an nn.Embedding."
            )
        return self._starts

    def _plant(self, arguments: Arguments, run: Callable[[Arguments], Tensor]) -> Tensor:
        output = run(arguments)
        args, kwargs = arguments
        tokens = args[0] if args else kwargs.get("input")
        if not isinstance(tokens, Tensor) or not self._expected(tokens):
            return output
        self._starts.append(output.detach().requires_grad_())
        return self._starts[-1]

    def _expected(self, tokens: Tensor) -> bool:
        """Say whether these are all tokens, or those of the next step; take note of how they lie."""
        if not self._starts:
            for flipped in (False, True):
                whole = self.x.transpose(0, 1) if flipped else self.x
                if tokens.shape == whole.shape and torch.equal(tokens, whole):
                    self._by_row ^= flipped
                    return True
        elif not self._steps:
            return False
        axis = 1 if self._by_row else 0
        if len(self._starts) >= self.x.shape[axis]:
            return False
        self._steps = torch.equal(tokens.flatten(), self.x.select(axis, len(self._starts)).flatten())
        return self._steps
