"""What a cell is, for type checkers and for readers."""

from __future__ import annotations

from typing import Protocol, TypeVar

from torch import Tensor

NativeState = TypeVar("NativeState")  # a tensor, or a nested tuple, dict or dataclass of tensors


class Cell(Protocol[NativeState]):
    """One step: input and state in, output and next state out.

    A module that has these two methods is a cell; nothing has to be inherited. Its state is a tensor, or a (nested)
    tuple, dict or dataclass of tensors, each with one entry for each row on one of its axes.

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

    This is what one should write. What is accepted is more: a cell may return its next state alone, and have a
    `hidden_size` in place of `initial_state` where its states begin as zeros. `hiddenstate.testing.check_cell` tries
    out whether a cell keeps what the library relies on.
    """

    def initial_state(self, batch: int) -> NativeState:
        """Return the state that `batch` sequences start from."""
        ...

    def __call__(self, x: Tensor, state: NativeState) -> tuple[Tensor, NativeState]:
        """Return the output `(batch, ...)` of one step `x (batch, ...)`, and the state after it."""
        ...
