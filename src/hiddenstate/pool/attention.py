"""Attention pooling: steps weighted by trained scores."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from ..errors import BadInput
from .pool import Pool, check_units
from .steps import Lengths, Source, Steps, read_steps


class Attention(Pool):
    """A weighted mean of each row's real steps, (batch, unit). The weights are a softmax of trained scores.

    The score of a step is `w · h`. A key projection with a trained query would be no more general: their product is one
    vector. `weights` returns how much each step counted.

    >>> attention = Attention(4)
    >>> h = torch.randn(2, 5, 4)
    >>> attention(h, [5, 3]).shape
    torch.Size([2, 4])
    >>> attention.weights(h, [5, 3])[1, 3:]
    tensor([0., 0.], grad_fn=...)
    """

    def __init__(self, units: int) -> None:
        super().__init__()
        self.units = _positive("units", units)
        self.score = nn.Linear(units, 1, bias=False)  # a bias would cancel in the softmax

    def weights(self, h: Source, lengths: Lengths | None = None) -> Tensor:
        """Return how much each step counts: (batch, time), zero on padding, summing to one."""
        steps = read_steps(h, lengths)
        check_units(steps, self.units, self)
        return _weights(self.score, steps.filled(0.0), steps).squeeze(1)

    def forward(self, h: Source, lengths: Lengths | None = None) -> Tensor:
        """Return the weighted means."""
        return self.pool(read_steps(h, lengths))

    def pool(self, steps: Steps) -> Tensor:
        """Return the weighted means."""
        check_units(steps, self.units, self)
        return _attend(self.score, steps).squeeze(1)

    def extra_repr(self) -> str:
        """Return the number of units, for printing."""
        return f"units={self.units}"


class MultiHead(Pool):
    """Several attentions side by side, each producing its share of the units: (batch, unit).

    Each head has its own scores and values, and `out` mixes their results. Values are projected after the weighted
    mean, which gives the same result as projecting before it, without a projected copy of every step.

    >>> MultiHead(6, heads=3)(torch.randn(2, 5, 6)).shape
    torch.Size([2, 6])
    """

    def __init__(self, units: int, heads: int) -> None:
        super().__init__()
        self.units = _positive("units", units)
        self.heads = _positive("heads", heads)
        if units % heads:
            raise BadInput(f"{units} units cannot be shared by {heads} heads: units must be a multiple of heads.")
        self.score = nn.Linear(units, heads, bias=False)
        self.value = nn.Parameter(torch.empty(heads, units, units // heads))
        self.out = nn.Linear(units, units)
        nn.init.uniform_(self.value, -1 / math.sqrt(units), 1 / math.sqrt(units))

    def weights(self, h: Source, lengths: Lengths | None = None) -> Tensor:
        """Return how much each step counts for each head: (batch, head, time), zero on padding, summing to one."""
        steps = read_steps(h, lengths)
        check_units(steps, self.units, self)
        return _weights(self.score, steps.filled(0.0), steps)

    def forward(self, h: Source, lengths: Lengths | None = None) -> Tensor:
        """Return the mixed results of all heads."""
        return self.pool(read_steps(h, lengths))

    def pool(self, steps: Steps) -> Tensor:
        """Return the mixed results of all heads."""
        check_units(steps, self.units, self)
        found = _attend(self.score, steps)  # (batch, head, unit)
        shares = torch.einsum("bhu,huv->bhv", found, self.value.to(found.dtype))
        mixed: Tensor = self.out(shares.flatten(1))
        return mixed

    def extra_repr(self) -> str:
        """Return the numbers of units and heads, for printing."""
        return f"units={self.units}, heads={self.heads}"


def _attend(score: nn.Linear, steps: Steps) -> Tensor:
    """Return each head's weighted mean: (batch, head, unit)."""

    def attend(h: Tensor) -> Tensor:
        return torch.bmm(_weights(score, h, steps), h)

    return steps.reduced(attend, attend, fill=0.0)


def _weights(score: nn.Linear, h: Tensor, steps: Steps) -> Tensor:
    """Return each head's weights: (batch, head, time)."""
    scores: Tensor = score(h).transpose(1, 2)
    wide = torch.promote_types(h.dtype, torch.float32)
    if steps.lengths is None:
        return scores.softmax(dim=-1, dtype=wide).to(h.dtype)
    valid = steps.valid.unsqueeze(1)
    weights = torch.where(valid, scores, -math.inf).softmax(dim=-1, dtype=wide)
    # The padding is zero already; this cuts its gradient, which large padding could make infinite.
    return torch.where(valid, weights, 0.0).to(h.dtype)


def _positive(name: str, number: int) -> int:
    if not isinstance(number, int) or isinstance(number, bool) or number < 1:
        raise BadInput(f"{name} is a whole number from 1, but this is {number!r}.")
    return number
