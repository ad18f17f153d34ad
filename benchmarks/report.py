"""What a report costs: its time in plain calls of the model, and the size of its page."""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch
from torch import nn

import hiddenstate as hs
from timing import compare


class Tagger(nn.Module):
    """Tokens in, scores at each step out."""

    def __init__(self, units: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(100, 32)
        self.lstm = nn.LSTM(32, units, batch_first=True)
        self.head = nn.Linear(units, 20)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the scores."""
        return self.head(self.lstm(self.embed(tokens))[0])


def main() -> None:
    """Compare a report with a forward and backward pass of the same model on the same input."""
    x = torch.randint(0, 100, (4, 160))
    path = Path(tempfile.mkdtemp(), "report.html")
    for units in (128, 256):
        model = Tagger(units)

        def plain(model: nn.Module = model) -> None:
            model(x).sum().backward()

        def report(model: nn.Module = model) -> None:
            hs.report(model, x, path=path)

        print(f"\n{units} units, 4 rows of 160 steps")
        print(compare({"forward and backward": plain, "hs.report": report}, rounds=5, at_least=0))
        print(f"page: {path.stat().st_size / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
