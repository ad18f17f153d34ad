"""Forms of a loop, continued: what is made of what the steps give."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from .by_index import GRUModel
from .case import FEATURES, UNITS, Family, series, series_and_lengths

case = Family("collected")


class Collector(GRUModel):
    """Runs the plain loop and gives the list of states to `made_of`."""

    def made_of(self, states):
        raise NotImplementedError

    def forward(self, x):
        h, states = self.start(x), []
        for t in range(x.size(1)):
            h = self.cell(x[:, t], h)
            states.append(h)
        return self.made_of(states)


@case(series())
class AsAList(Collector):
    def made_of(self, states):
        return states


@case(series())
class MeanOfAList(Collector):
    def made_of(self, states):
        return sum(states) / len(states)


@case(series())
class EverySecond(Collector):
    def made_of(self, states):
        return torch.stack(states[::2], dim=1)


@case(series())
class LastThree(Collector):
    def made_of(self, states):
        return torch.cat(states[-3:], dim=-1)


@case(series())
class MiddleAndLast(Collector):
    """Two of the states, picked by number."""

    def made_of(self, states):
        return states[len(states) // 2] * 2, self.out(states[-1])


@case(series())
class ConcatenatedFeatures(Collector):
    """All steps in one row: (batch, time * unit)."""

    def made_of(self, states):
        return torch.cat(states, dim=1), torch.hstack(states), torch.vstack(states)


@case(series())
class StackedLast(Collector):
    def made_of(self, states):
        return torch.stack(states, dim=-1).max(dim=-1).values


@case(series())
class HeadPerStep(Collector):
    """The head goes over the list after the loop."""

    def made_of(self, states):
        return torch.stack([F.softmax(self.out(h), -1) for h in states]).transpose(0, 1)


@case(series())
class SelfAttentionOverStates(nn.Module):
    """Attention over all states, after the loop; the loop is one of two branches of the net."""

    def __init__(self):
        super().__init__()
        self.cell, self.attn = nn.GRUCell(FEATURES, UNITS), nn.MultiheadAttention(UNITS, 2, batch_first=True)
        self.conv = nn.Conv1d(FEATURES, UNITS, 3, padding=1)

    def forward(self, x):
        h, hs = x.new_zeros(x.size(0), UNITS), []
        for x_t in x.unbind(1):
            h = self.cell(x_t, h)
            hs.append(h)
        hs = torch.stack(hs, 1)
        mixed, _ = self.attn(hs, hs, hs)
        return mixed + self.conv(x.transpose(1, 2)).transpose(1, 2)


@case(series_and_lengths)
class LastValid(GRUModel):
    """The last real state of each row is gathered after the loop."""

    def forward(self, x, lengths):
        h, hs = self.start(x), []
        for t in range(x.size(1)):
            h = self.cell(x[:, t], h)
            hs.append(h)
        hs = torch.stack(hs, 1)
        return hs[torch.arange(len(lengths)), lengths - 1]


@case(series_and_lengths)
class PickedOnTheWay(GRUModel):
    """The last real state is caught in the loop by torch.where on a tensor of indices."""

    def forward(self, x, lengths):
        h, final = self.start(x), self.start(x)
        steps = torch.arange(x.size(1))
        for x_t, t in zip(x.unbind(1), steps, strict=True):
            h = self.cell(x_t, h)
            final = torch.where((lengths - 1 == t).unsqueeze(1), h, final)
        return final


@case(series())
class IntoSlices(GRUModel):
    """Rows are written as slices of one step, into a tensor with room for outputs and states side by side."""

    def forward(self, x):
        h = self.start(x)
        room = torch.zeros(x.size(0), x.size(1), UNITS + 2, dtype=x.dtype)
        for t in range(x.size(1)):
            h = self.cell(x[:, t], h)
            room[:, t : t + 1, :UNITS] = h.unsqueeze(1)
            room[:, t, UNITS:] = self.out(h)
        return room


@case(series())
class FromTheBack(GRUModel):
    """Backwards in time, written where it belongs."""

    def forward(self, x):
        h, T = self.start(x), x.size(1)
        y = x.new_empty(x.size(0), T, UNITS)
        for t in range(T - 1, -1, -1):
            h = self.cell(x[:, t], h)
            y[:, t] = h
        return y, h


@case(series(), expect="may", why="outputs are added into a tensor that has a value before")
class AddedIntoResidual(nn.Module):
    def __init__(self):
        super().__init__()
        self.cell, self.skip = nn.GRUCell(FEATURES, UNITS), nn.Linear(FEATURES, UNITS)

    def forward(self, x):
        y, h = self.skip(x), x.new_zeros(x.size(0), UNITS)
        for t in range(x.size(1)):
            h = self.cell(x[:, t], h)
            y[:, t] += h
        return y


@case(series(), expect="may", why="overlap-add: each step writes three rows of the output")
class OverlapAdd(nn.Module):
    def __init__(self):
        super().__init__()
        self.cell, self.synth = nn.GRUCell(FEATURES, UNITS), nn.Linear(UNITS, 3)

    def forward(self, x):
        h = x.new_zeros(x.size(0), UNITS)
        y = x.new_zeros(x.size(0), x.size(1) + 2)
        for t in range(x.size(1)):
            h = self.cell(x[:, t], h)
            y[:, t : t + 3] += self.synth(h)
        return y


@case(series())
class TwoLengths(GRUModel):
    """States with the start, outputs without it; the start is learned."""

    def __init__(self):
        super().__init__()
        self.h0 = nn.Parameter(torch.randn(UNITS) * 0.1)

    def forward(self, x):
        hs = [self.h0.repeat(x.size(0), 1)]
        ys = []
        for x_t in x.unbind(1):
            hs.append(self.cell(x_t, hs[-1]))
            ys.append(self.out(torch.cat([hs[-2], hs[-1]], 0)).chunk(2)[1] + hs[-2].mean(1, keepdim=True))
        return torch.stack(hs, 1), torch.stack(ys, 1)


@case(series())
class IntegersOnTheWay(GRUModel):
    """Collects classes, comparisons and counts beside floats: outputs and states of whole numbers and truth values."""

    def forward(self, x):
        h = self.start(x)
        count = torch.zeros(x.size(0), dtype=torch.long)
        classes, fired, ys = [], [], []
        for x_t in x.unbind(1):
            h = self.cell(x_t, h)
            cls = self.out(h).argmax(-1)
            count = count + cls
            classes.append(cls)
            fired.append(h > 0.1)
            ys.append(h * (count > 2).unsqueeze(-1).to(h.dtype))
        return torch.stack(ys, 1), torch.stack(classes, 1), torch.stack(fired, 1), count


@case(series(), expect="may", why="the outputs are held in a dict by step, then in order")
class ByStepInADict(GRUModel):
    def forward(self, x):
        h, found = self.start(x), {}
        for t in range(x.size(1)):
            h = self.cell(x[:, t], h)
            found[f"step_{t}"] = self.out(h)
        return found


@case(series())
class StateNotUsed(GRUModel):
    """The head is applied in the loop but only its last value is used: the other work is for nothing."""

    def forward(self, x):
        h, y = self.start(x), None
        for x_t in x.unbind(1):
            h = self.cell(x_t, h)
            y = self.out(h)
        return y
