"""Concatenating the results of several pools."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ..errors import BadInput
from .pool import Pool
from .steps import Lengths, Source, Steps, read_steps


class Concat(Pool):
    """The results of several pools, one after another: (batch, sum of their units).

    A result with more axes, such as that of `Taps`, is flattened to one.

    >>> from hiddenstate.pool import Last, Max, Mean
    >>> Concat(Last(), Mean(), Max())(torch.randn(2, 5, 4)).shape
    torch.Size([2, 12])
    """

    def __init__(self, *pools: nn.Module) -> None:
        super().__init__()
        if not pools:
            raise BadInput("Concat needs one pool or more, for example Concat(Last(), Mean()).")
        for pool in pools:
            _check_pool(pool)
        self.pools = nn.ModuleList(pools)

    def forward(self, h: Source, lengths: Lengths | None = None) -> Tensor:
        """Return the results of all pools."""
        return self.pool(read_steps(h, lengths))

    def pool(self, steps: Steps) -> Tensor:
        """Return the results of all pools."""
        return torch.cat([_result(pool, steps).flatten(1) for pool in self.pools], dim=-1)


def _result(pool: nn.Module, steps: Steps) -> Tensor:
    result: Tensor = pool.pool(steps) if isinstance(pool, Pool) else pool(steps.h, steps.lengths)
    return result


def _check_pool(pool: object) -> None:
    if not isinstance(pool, nn.Module):
        hint = f" Make one of it: {pool.__name__}()." if isinstance(pool, type) else ""
        raise BadInput(f"Concat takes pools one by one, as in Concat(Last(), Mean()), but this is {pool!r}.{hint}")
