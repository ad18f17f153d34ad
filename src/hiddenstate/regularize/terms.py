"""The penalties themselves: plain functions of states, without coefficients."""

from __future__ import annotations

import torch
from torch import Tensor

from .masking import Lengths, Source, mean_over, read_states


def activity(h: Source, lengths: Lengths | None = None) -> Tensor:
    """Return the mean square of the states, over all real steps and units: large activity costs.

    >>> activity(torch.tensor([[[1.0], [3.0], [9.0]]]), [2])
    tensor(5.)
    """
    states, valid = read_states(h, lengths)
    return mean_over(states.square(), valid, what="step")


def temporal(h: Source, lengths: Lengths | None = None) -> Tensor:
    """Return the mean square of what changes from one step to the next: quick changes cost.

    >>> temporal(torch.tensor([[[1.0], [3.0], [9.0]]]), [2])
    tensor(4.)
    """
    states, valid = read_states(h, lengths)
    return _mean_over_pairs((states[:, 1:] - states[:, :-1]).square(), valid)


def norm_stabilizer(h: Source, lengths: Lengths | None = None) -> Tensor:
    """Return the mean square of how much the norm of the state changes from one step to the next.

    >>> norm_stabilizer(torch.tensor([[[3.0, 4.0], [0.0, 5.0], [0.0, 8.0]]]))
    tensor(4.5000)
    """
    states, valid = read_states(h, lengths)
    norms = torch.linalg.vector_norm(states, dim=-1)  # (batch, time)
    return _mean_over_pairs((norms[:, 1:] - norms[:, :-1]).square(), valid)


def _mean_over_pairs(values: Tensor, valid: Tensor | None) -> Tensor:
    if valid is None:
        return mean_over(values, None, what="pair of neighboring steps")
    pairs = valid[:, 1:]  # a step counts only where the one before it does
    pairs_like = pairs.reshape(*pairs.shape, *(1,) * (values.dim() - 2))
    return mean_over(torch.where(pairs_like, values, 0.0), pairs, what="pair of neighboring steps")
