"""A model of which the first edition left a recording, checkpoints and sessions in `tests/data/first_edition`.

Made by `python -m tests.support.first_edition FOLDER`, run with the source of that edition.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from torch import Tensor, nn

import hiddenstate as hs

DATA = Path(__file__).parents[1] / "data" / "first_edition"


class Model(nn.Module):
    """A fused layer and a cell."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(3, 4, 2, batch_first=True)
        self.cell = nn.GRUCell(4, 5)
        self.head = nn.Linear(5, 2)
        with torch.no_grad():
            for weight in self.parameters():  # numbers that every machine writes alike
                weight.copy_(((torch.arange(weight.numel()) % 7 - 3) / 8).view_as(weight))

    def forward(self, x: Tensor) -> Tensor:
        y, _ = self.lstm(x)
        h, outs = None, []
        for step in y.unbind(1):
            h = self.cell(step, h)
            outs.append(h)
        return self.head(torch.stack(outs, 1))


X = ((torch.arange(36) % 5 - 2) / 4).view(2, 6, 3)


def main(folder: Path) -> None:
    """Write everything."""
    folder.mkdir(parents=True)
    model = Model().eval()
    with torch.no_grad(), hs.record(model, gates=True, to=folder / "recording"):
        model(X)
        model(X[:, :4])
    with torch.no_grad(), hs.Carry(model) as carry:
        model(X[:, :4])
        carry.state.save(folder / "state.safetensors")
        carry.reset([1])
        torch.save(carry.state_dict(), folder / "carry.pt")
    with hs.serve.Engine(model, f"sqlite:///{folder / 'sessions.sqlite'}", example=X) as engine:
        engine.open("one")
        engine.push("one", X[0, :3])
        engine.push("one", X[0, 3:4])


if __name__ == "__main__":
    main(Path(sys.argv[1]))
