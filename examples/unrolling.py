"""A cell that no kernel exists for, at the speed of one: its schedule, and what that is worth.

The cell is a minimal gated unit with a layer norm, written as one writes it: a plain module with forward(x, state).
"""

from __future__ import annotations

import argparse
import time

import torch
from torch import Tensor, nn

import hiddenstate as hs


class Gated(nn.Module):
    """One gate, one candidate, one norm."""

    def __init__(self, input_size: int, hidden_size: int) -> None:
        super().__init__()
        self.input_size, self.hidden_size = input_size, hidden_size
        self.inner = nn.Linear(input_size, 2 * hidden_size)
        self.recurrent = nn.Linear(hidden_size, 2 * hidden_size, bias=False)
        self.norm = nn.LayerNorm(2 * hidden_size)

    def forward(self, x: Tensor, state: Tensor) -> Tensor:
        """Return the next state."""
        keep, candidate = (self.inner(x) + self.norm(self.recurrent(state))).chunk(2, dim=-1)
        keep = torch.sigmoid(keep)
        return keep * state + (1 - keep) * torch.tanh(candidate)


def seconds(cell: nn.Module, x: Tensor, engine: str) -> float:
    """Return the time of one forward and backward pass, the best of a few."""
    taken = []
    for _ in range(5):
        start = time.perf_counter()
        hs.unroll(cell, x, engine=engine)[0].sum().backward()
        taken.append(time.perf_counter() - start)
    return min(taken[1:])


def main() -> None:
    """Print the schedule, and the time with and without it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=500)
    steps = parser.parse_args().steps
    torch.manual_seed(0)
    cell, x = Gated(64, 128), torch.randn(4, steps, 64)
    print(hs.explain(cell, x), "\n")
    loop, fast = seconds(cell, x, "loop"), seconds(cell, x, "fast")
    print(f"forward and backward, {steps} steps: {1e3 * loop:.1f} ms in the loop, {1e3 * fast:.1f} ms by the schedule")
    lengths, resets = torch.tensor([steps, steps // 2, 3, 1]), torch.rand(4, steps) < 0.02
    outputs, state = hs.unroll(cell, x, lengths=lengths, resets=resets, engine="fast")
    print(f"with lengths and new starts: outputs {tuple(outputs.shape)}, {state}")


if __name__ == "__main__":
    main()
