"""Tricky: time is not taken one step after the other: ahead, back, in windows, pairs, jumps and along other axes."""

from __future__ import annotations

from collections import deque

import torch
from torch import nn

from .by_index import GRUModel
from .case import FEATURES, UNITS, Family, normal, series

case = Family("ways_of_time")


@case(series(), why="reads the next input, so there is one step less", least=2)
class LooksAhead(nn.Module):
    def __init__(self):
        super().__init__()
        self.cell, self.pred = nn.GRUCell(FEATURES, UNITS), nn.Linear(UNITS, FEATURES)

    def forward(self, x):
        h, errors = x.new_zeros(x.size(0), UNITS), []
        for t in range(x.size(1) - 1):
            h = self.cell(x[:, t], h)
            errors.append((self.pred(h) - x[:, t + 1]).square().mean(-1))
        return torch.stack(errors, 1)


@case(series(), expect="may", why="the first step reads the last input: index -1 wraps around")
class LooksBackAndWraps(GRUModel):
    def forward(self, x):
        h = self.start(x)
        for t in range(x.size(1)):
            h = self.cell(x[:, t] - x[:, t - 1], h)
        return h


@case(series(), expect="may", why="overlapping windows of three steps", least=3)
class SlidingWindow(nn.Module):
    def __init__(self):
        super().__init__()
        self.cell = nn.GRUCell(3 * FEATURES, UNITS)

    def forward(self, x):
        h = x.new_zeros(x.size(0), UNITS)
        for t in range(x.size(1) - 2):
            h = self.cell(x[:, t : t + 3].flatten(1), h)
        return h


@case(series(), expect="may", why="the last windows are shorter than the others")
class ShrinkingWindow(GRUModel):
    def forward(self, x):
        h = self.start(x)
        for t in range(x.size(1)):
            h = self.cell(x[:, t : t + 3].mean(1), h)
        return h


@case(series(), why="every second step")
class StrideTwo(GRUModel):
    def forward(self, x):
        h, ys = self.start(x), []
        for t in range(0, x.size(1), 2):
            h = self.cell(x[:, t], h)
            ys.append(h)
        return torch.stack(ys, 1)


@case(series(), expect="may", why="pairs of steps are put together, an odd one is dropped", least=2)
class Pyramid(nn.Module):
    """The listener of listen, attend and spell."""

    def __init__(self):
        super().__init__()
        self.cell = nn.GRUCell(2 * FEATURES, UNITS)

    def forward(self, x):
        h, ys = x.new_zeros(x.size(0), UNITS), []
        for t in range(x.size(1) // 2):
            h = self.cell(torch.cat([x[:, 2 * t], x[:, 2 * t + 1]], -1), h)
            ys.append(h)
        return torch.stack(ys, 1)


@case(series(), why="one loop along time, another along features: the same tensor, two axes")
class TwoAxes(nn.Module):
    def __init__(self):
        super().__init__()
        self.along_time, self.along_features = nn.GRUCell(FEATURES, UNITS), nn.GRUCell(UNITS, 8)

    def forward(self, x):
        h, ys = x.new_zeros(x.size(0), UNITS), []
        for t in range(x.size(1)):
            h = self.along_time(x[:, t], h)
            ys.append(h)
        y = torch.stack(ys, -1).mean(-1, keepdim=True) * x.mean(1, keepdim=True)  # (batch, unit, feature)
        g = x.new_zeros(x.size(0), 8)
        for f in range(y.size(2)):
            g = self.along_features(y[:, :, f], g)
        return g


@case(lambda batch, steps: (normal(batch, 3, steps, FEATURES),), expect="may", why="a grid: each step reads two states")
class GridRNN(nn.Module):
    """Multi-dimensional RNN: the state of the row above and of the step before."""

    def __init__(self):
        super().__init__()
        self.w = nn.Linear(FEATURES + 2 * UNITS, UNITS)

    def forward(self, x):
        B, R, T, _ = x.shape
        zero = x.new_zeros(B, UNITS)
        grid = [[zero] * (T + 1) for _ in range(R + 1)]
        for i in range(R):
            for j in range(T):
                grid[i + 1][j + 1] = torch.tanh(self.w(torch.cat([x[:, i, j], grid[i][j + 1], grid[i + 1][j]], -1)))
        return torch.stack([torch.stack(row[1:], 1) for row in grid[1:]], 1)


@case(series(), expect="may", why="the order of the steps is drawn anew in each call")
class RandomOrder(GRUModel):
    def forward(self, x):
        h = self.start(x)
        for t in torch.randperm(x.size(1)).tolist():
            h = self.cell(x[:, t], h)
        return h


@case(series(), expect="may", why="reads its state of three steps ago: a delay line of fixed length")
class DilatedRNN(GRUModel):
    def forward(self, x):
        past = deque([self.start(x)] * 3, maxlen=3)
        ys = []
        for x_t in x.unbind(1):
            past.append(self.cell(x_t, past[0]))
            ys.append(past[-1])
        return torch.stack(ys, 1)
