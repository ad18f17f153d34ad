"""The steps of a cell put where they belong: rows in the user's order, reverse runs in the order of positions."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .steps import Steps


@dataclass(frozen=True, slots=True, eq=False)
class Arranged:
    """A cell's steps as its user sees them.

    A stack runs its longest rows first, so that those still running are always the first ones, and turns each row
    round for a reverse cell.
    """

    steps: Steps
    reverse: bool

    @property
    def lengths(self) -> Tensor:
        """How many steps each row had, `(batch,)`."""
        seen = self.steps.row_lengths()
        return seen if self.steps.order is None else seen[self.steps.order.argsort()]

    def initial(self) -> dict[str, Tensor]:
        """Return the state before the first step."""
        return {name: self._rows(part.unsqueeze(0))[0] for name, part in self.steps.initial.items()}

    def states(self) -> dict[str, Tensor]:
        """Return each part of the state, `(time, batch, unit)`."""
        return {name: self._placed(part) for name, part in self.steps.states().items()}

    @property
    def gates(self) -> dict[str, Tensor]:
        """Each gate by name."""
        return {name: self._placed(gate) for name, gate in self.steps.gates.items()}

    def grads(self) -> dict[str, Tensor]:
        """Return the gradient of each part at every step."""
        return {name: self._placed(grad) for name, grad in self.steps.grads().items()}

    def expects_grads(self) -> bool:
        """Say whether a backward pass may still bring the first gradients."""
        return self.steps.expects_grads()

    def _placed(self, values: Tensor) -> Tensor:
        values = self._rows(values)
        if not self.reverse:
            return values
        step, lengths = torch.arange(len(values)).unsqueeze(1), self.lengths  # (time, 1), (batch,)
        turned = torch.where(step < lengths, lengths - 1 - step, step).to(values.device)
        return values.gather(0, turned.unsqueeze(-1).expand_as(values))

    def _rows(self, values: Tensor) -> Tensor:
        order = self.steps.order
        return values if order is None else values.index_select(1, order.argsort().to(values.device))
