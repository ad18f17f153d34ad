"""The protocol of a cell, for type checkers and as documentation."""

from __future__ import annotations

from typing import Protocol, TypeVar

from torch import Tensor

NativeState = TypeVar("NativeState")  # a tensor, or a nested tuple, dict or dataclass of tensors


class Cell(Protocol[NativeState]):
    """One step of a recurrence: takes an input and a state, returns an output and the next state.

    A module with these two methods is a cell; it need not inherit from this class. Its state is a tensor, or a nested
    tuple, dict or dataclass of tensors. Each tensor has one entry for each row of the batch, along one of its axes.

    >>> class Leaky(torch.nn.Module):
    ...     def __init__(self, input_size, hidden_size):
    ...         super().__init__()
    ...         self.hidden_size, self.inner = hidden_size, torch.nn.Linear(input_size, hidden_size)
    ...     def initial_state(self, batch):
    ...         return torch.zeros(batch, self.hidden_size)
    ...     def forward(self, x, h):
    ...         h = 0.9 * h + 0.1 * torch.tanh(self.inner(x))
    ...         return h, h
    >>> def first_output(cell: Cell[torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    ...     output, _ = cell(x, cell.initial_state(len(x)))
    ...     return output
    >>> first_output(Leaky(3, 5), torch.randn(2, 3)).shape
    torch.Size([2, 5])

    Write cells this way. The library accepts more: a cell may return its next state alone, and if its states start
    as zeros, it may have a `hidden_size` instead of `initial_state`. `hiddenstate.testing.check_cell` checks that a
    cell does all that the library relies on.
    """

    def initial_state(self, batch: int) -> NativeState:
        """Return the state that `batch` sequences start from."""
        ...

    def __call__(self, x: Tensor, state: NativeState) -> tuple[Tensor, NativeState]:
        """Return the output `(batch, ...)` of one step `x (batch, ...)`, and the state after it."""
        ...
