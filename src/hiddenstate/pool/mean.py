"""The mean over real steps."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from .pool import Pool
from .steps import Lengths, Source, Steps, read_steps, uncast


class Mean(Pool):
    """The mean of each row's real steps, (batch, unit).

    >>> Mean()(torch.tensor([[[1.0], [3.0], [torch.nan]]]), [2])
    tensor([[2.]])
    """

    def forward(self, h: Source, lengths: Lengths | None = None) -> Tensor:
        """Return the means."""
        return self.pool(read_steps(h, lengths))

    def pool(self, steps: Steps) -> Tensor:
        """Return the means."""
        if steps.lengths is None:
            return steps.h.mean(dim=1)
        lengths = steps.lengths.unsqueeze(1)

        def quick(h: Tensor) -> Tensor:
            share = (steps.valid / lengths.to(h.dtype)).unsqueeze(1)  # (batch, 1, time)
            with uncast():
                return torch.bmm(share, h).squeeze(1)

        def exact(h: Tensor) -> Tensor:
            # Summed in float32 if the states are half precision, as Tensor.mean does.
            wide = torch.promote_types(h.dtype, torch.float32)
            return (h.sum(dim=1, dtype=wide) / lengths).to(h.dtype)

        if steps.may_look and not steps.wants_grad and steps.h.dtype == torch.float32 and steps.h.is_contiguous():
            return _sum_of_real_steps(steps.h, steps.valid, steps.lengths) / lengths
        return steps.reduced(quick, exact, fill=0.0)


def _sum_of_real_steps(h: Tensor, valid: Tensor, lengths: Tensor) -> Tensor:
    # A sum of embeddings (EmbeddingBag) reads only the rows that are named, so not even padding. Its gradient is slow.
    rows = valid.flatten().nonzero().squeeze(1)
    return F.embedding_bag(rows, h.flatten(0, 1), lengths.cumsum(0) - lengths, mode="sum")
