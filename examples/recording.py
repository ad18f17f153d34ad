"""See what an LSTM remembers: record every gate while it learns to hold one bit over many steps.

The first symbol of each sequence is the answer; noise follows. After training, the units that hold the bit are those
whose forget gate stays open, and the recording shows it: nothing in the model or its training knows of it.
"""

from __future__ import annotations

import argparse

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

import hiddenstate as hs


class Rememberer(nn.Module):
    """An ordinary model: an LSTM, and a head on its last state."""

    def __init__(self, units: int = 16) -> None:
        super().__init__()
        self.lstm = nn.LSTM(1, units, batch_first=True)
        nn.init.ones_(self.lstm.bias_hh_l0[units : 2 * units])  # forget gates start open, as usual
        self.head = nn.Linear(units, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Return the logit that the first symbol was 1."""
        return self.head(self.lstm(x)[0][:, -1]).squeeze(-1)


def batch(rows: int, steps: int) -> tuple[Tensor, Tensor]:
    """Return sequences that begin with -1 or 1 and go on with noise, and whether they began with 1."""
    bits = torch.randint(2, (rows,)).float()
    x = 0.3 * torch.randn(rows, steps, 1)
    x[:, 0, 0] = 2 * bits - 1
    return x, bits


def train(model: Rememberer, updates: int, steps: int) -> float:
    """Train, and return the accuracy on fresh sequences."""
    optimizer = torch.optim.Adam(model.parameters(), 0.02)
    for _ in range(updates):
        x, bits = batch(64, steps)
        nn.functional.binary_cross_entropy_with_logits(model(x), bits).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    x, bits = batch(512, steps)
    with torch.no_grad():
        return float(((model(x) > 0) == bits.bool()).float().mean())


def main() -> None:
    """Train, record, and print the units that remember."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--updates", type=int, default=400)
    parser.add_argument("--steps", type=int, default=20)
    arguments = parser.parse_args()
    torch.manual_seed(0)
    model = Rememberer()
    accuracy = train(model, arguments.updates, arguments.steps)

    x, bits = batch(256, arguments.steps)
    with hs.record(model, gates=True) as rec:
        model(x)
    run = rec["lstm"]
    print(f"accuracy {accuracy:.2f} after {arguments.updates} updates; what was recorded:\n{rec}")

    last = run.c[:, -1]
    apart = (last[bits == 1].mean(0) - last[bits == 0].mean(0)).abs() / last.std(0)
    table = Table("unit", "tells the bit by", "forget gate, mean after step 0")
    for unit in apart.argsort(descending=True)[:5].tolist():
        table.add_row(str(unit), f"{apart[unit]:.1f} sigma", f"{run.gates['forget'][:, 1:, unit].mean():.2f}")
    Console().print(table)


if __name__ == "__main__":
    main()
