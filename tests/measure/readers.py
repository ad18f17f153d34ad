"""Models that read a sequence, and the slow and obvious way to measure what they remember."""

from __future__ import annotations

import torch
from torch import nn


class Tagger(nn.Module):
    """Tokens to scores at each step."""

    def __init__(self, tokens=11, units=6, out=4, batch_first=True):
        super().__init__()
        self.embed = nn.Embedding(tokens, 5)
        self.gru = nn.GRU(5, units, batch_first=batch_first)
        self.drop = nn.Dropout(0.5)
        self.norm = nn.BatchNorm1d(units)
        self.head = nn.Linear(units, out)

    def forward(self, tokens):
        y = self.drop(self.gru(self.embed(tokens))[0])
        return self.head(self.norm(y.transpose(1, 2)).transpose(1, 2))


class Last(nn.Module):
    """Real numbers to one score for a sequence."""

    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(3, 5, batch_first=True)
        self.head = nn.Linear(5, 1)

    def forward(self, x):
        return self.head(self.lstm(x)[0][:, -1]).squeeze(1)


def slow_curve(layer, x):
    """The obvious way: the whole Jacobian of the last output, one row of the batch after the other."""
    curves = []
    for row in x:
        jacobian = torch.autograd.functional.jacobian(lambda one: layer(one.unsqueeze(0))[0][0, -1], row)
        curves.append(jacobian.flatten(2).square().sum((0, 2)).sqrt().flip(0))  # (out, time, feature) -> (lag,)
    return torch.stack(curves).mean(0)
