"""A small model, batches for it, and the loop that trains it, as users write them."""

import torch
from torch import nn


class Model(nn.Module):
    """A fused layer, and a cell that is stepped over its output."""

    def __init__(self, **options):
        super().__init__()
        self.lstm = nn.LSTM(3, 8, batch_first=True, **options)
        self.cell = nn.GRUCell(8, 8)
        self.fc = nn.Linear(8, 1)

    def forward(self, x):
        out, _ = self.lstm(x)
        h = x.new_zeros(len(x), 8)
        for step in out.unbind(1):
            h = self.cell(step, h)
        return self.fc(h)


def train(model, optimizer, batches):
    """One update for each batch."""
    for x in batches:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()


def batches(count, *, bad=None):
    """So many batches; the one at `bad` has a NaN in row 2 at step 3."""
    made = [torch.randn(4, 6, 3) for _ in range(count)]
    if bad is not None:
        made[bad][2, 3, 1] = float("nan")
    return made
