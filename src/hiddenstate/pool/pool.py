"""The base class of all pools: how they are called."""

from __future__ import annotations

from torch import Tensor, nn

from ..errors import BadInput
from .steps import Lengths, Source, Steps, read_steps, traced


class Pool(nn.Module):
    """A map from states along time `(batch, time, unit)` to one result for each row.

    Call it with a tensor and, if rows differ, their `lengths (batch,)`; or with a Trajectory or a PackedSequence, which
    have lengths of their own. Padding never counts. To write a pool, subclass this with a method `pool(steps)`.
    """

    # Our own pools repeat this method: torch.compile limits recompilations per method, so a shared one would soon
    # exceed the limit.
    def forward(self, h: Source, lengths: Lengths | None = None) -> Tensor:
        """Return the pooled states, (batch, ...)."""
        return self.pool(read_steps(h, lengths))

    def pool(self, steps: Steps) -> Tensor:
        """Return the result for checked steps."""
        raise NotImplementedError(f"{type(self).__name__} needs a method pool(steps).")


def check_units(steps: Steps, units: int, pool: nn.Module) -> None:
    """Raise for states with another number of units than the pool was made for."""
    if not traced() and steps.h.shape[-1] != units:
        raise BadInput(
            f"{type(pool).__name__} was made for {units} units, but the states have {steps.h.shape[-1]}. "
            f"A bidirectional layer gives twice its hidden_size, and one with proj_size gives that many."
        )
