"""The largest value of each unit over real steps, hard and soft."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .pool import Pool
from .steps import Lengths, Source, Steps, read_steps, uncast

# exp(-57): in a sum of exponentials that is larger, no term is below the precision of the sum.
_PRECISE = 1e-25


class Max(Pool):
    """The largest value of each unit over its row's real steps, (batch, unit); of equal values, one gets the gradient.

    >>> Max()(torch.tensor([[[-1.0], [-3.0], [0.0]]]), [2])
    tensor([[-1.]])
    """

    def forward(self, h: Source, lengths: Lengths | None = None) -> Tensor:
        """Return the maxima."""
        return self.pool(read_steps(h, lengths))

    def pool(self, steps: Steps) -> Tensor:
        """Return the maxima."""

        def quick(h: Tensor) -> Tensor:
            # Adding 0 or -inf is several times faster than torch.where; NaN and +Inf in the padding stay visible as
            # NaN.
            bias = torch.where(steps.valid, h.new_zeros(()), -math.inf)  # (batch, time)
            return _maximum(h + bias.unsqueeze(-1))

        if steps.lengths is not None and steps.may_look and not steps.wants_grad and _long_rows(steps.h):
            return torch.stack([row[:n].amax(0) for row, n in zip(steps.h, steps.lengths.tolist(), strict=True)])
        return steps.reduced(quick, _maximum, fill=-math.inf)


class LogSumExp(Pool):
    """The logarithm of the sum of exponentials over each row's real steps, (batch, unit): a soft maximum.

    It lies between the maximum and the maximum plus log(length), and sends gradient to all steps.

    >>> LogSumExp()(torch.tensor([[[0.0], [0.0], [9.0]]]), [2]).exp().round()
    tensor([[2.]])
    """

    def forward(self, h: Source, lengths: Lengths | None = None) -> Tensor:
        """Return the soft maxima."""
        return self.pool(read_steps(h, lengths))

    def pool(self, steps: Steps) -> Tensor:
        """Return the soft maxima."""

        def quick(h: Tensor) -> Tensor:
            peak = h.detach().amax(dim=1)  # includes the padding
            with uncast():
                mass = torch.bmm(steps.valid.to(h.dtype).unsqueeze(1), (h - peak.unsqueeze(1)).exp()).squeeze(1)
            # If the padding is far larger, little precision is left; the result is then not finite, which triggers
            # `exact`.
            return torch.where(mass > _PRECISE, mass, math.nan).log() + peak

        return steps.reduced(quick, _logsumexp, fill=-math.inf)


def _maximum(h: Tensor) -> Tensor:
    # amax is faster forward, but slower backward, since it shares the gradient between equal steps.
    return h.max(dim=1).values if h.requires_grad and torch.is_grad_enabled() else h.amax(dim=1)


def _logsumexp(h: Tensor) -> Tensor:
    return h.logsumexp(dim=1)


def _long_rows(h: Tensor) -> bool:
    # Beyond this size, skipping the padding saves more time than a loop over rows costs.
    return h.shape[1] * h.shape[2] >= 2**15
