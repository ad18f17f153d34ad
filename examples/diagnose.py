"""Three mistakes of a cell written by hand, found one after another.

Run it: python examples/diagnose.py
"""

import torch
from torch import Tensor, nn

import hiddenstate as hs


class Cell(nn.Module):
    """A plain recurrent cell, and what the attempts below share."""

    def __init__(self, input_size: int = 3, hidden_size: int = 16) -> None:
        super().__init__()
        self.input_size, self.hidden_size = input_size, hidden_size
        self.inner = nn.Linear(input_size, hidden_size)
        self.recurrent = nn.Linear(hidden_size, hidden_size)


class RandomStart(Cell):
    """The first attempt: every sequence starts somewhere else."""

    def initial_state(self, batch: int) -> Tensor:
        """Return a first state."""
        return torch.randn(batch, self.hidden_size)

    def forward(self, x: Tensor, h: Tensor) -> Tensor:
        """Return the next state."""
        return torch.tanh(self.inner(x) + self.recurrent(h))


class Forgetful(Cell):
    """The second: the recurrent term got lost on the way."""

    def forward(self, x: Tensor, h: Tensor) -> Tensor:
        """Return the next state."""
        return torch.tanh(self.inner(x))


class Cut(Cell):
    """The third: it remembers, and cannot learn to."""

    def forward(self, x: Tensor, h: Tensor) -> Tensor:
        """Return the next state."""
        return torch.tanh(self.inner(x) + self.recurrent(h.detach()))


class Mended(Cell):
    """And this one is well."""

    def forward(self, x: Tensor, h: Tensor) -> Tensor:
        """Return the next state."""
        return torch.tanh(self.inner(x) + self.recurrent(h))


def main() -> None:
    """Examine one attempt after the other."""
    torch.manual_seed(0)
    for attempt, expected in ((RandomStart, "HS202"), (Forgetful, "HS103"), (Cut, "HS105"), (Mended, None)):
        report = hs.diagnose(attempt())  # a cell needs no input: one is invented
        print(report, end="\n\n")
        found = report[0].code if len(report) else None
        assert found == expected, f"{attempt.__name__}: expected {expected}, found {found}"
    print("Three mistakes found, one cell mended.")


if __name__ == "__main__":
    main()
