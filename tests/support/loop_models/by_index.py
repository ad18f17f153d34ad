"""Tricky: the body depends on the index, or on how many steps and rows there are."""

from __future__ import annotations

import torch
from torch import nn

from .case import FEATURES, UNITS, Family, normal, series, setting

case = Family("by_index")


class GRUModel(nn.Module):
    """A cell and a readout: what most of these models are made of."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.GRUCell(FEATURES, UNITS)
        self.out = nn.Linear(UNITS, 2)

    def start(self, x):
        return x.new_zeros(x.size(0), UNITS)


@case(series(), expect="may", why="two cells take turns: a period of two steps, and an odd step left over")
class TakingTurns(GRUModel):
    def __init__(self):
        super().__init__()
        self.other = nn.GRUCell(FEATURES, UNITS)

    def forward(self, x):
        h, ys = self.start(x), []
        for t in range(x.size(1)):
            h = self.cell(x[:, t], h) if t % 2 == 0 else self.other(x[:, t], h)
            ys.append(h)
        return torch.stack(ys, 1)


@case(series(), expect="may", why="the first step has a layer of its own")
class FirstStepApart(GRUModel):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(FEATURES, UNITS)

    def forward(self, x):
        ys = []
        for t in range(x.size(1)):
            if t == 0:  # noqa: SIM108
                h = torch.tanh(self.first(x[:, t]))
            else:
                h = self.cell(x[:, t], h)
            ys.append(self.out(h))
        return torch.stack(ys, 1)


@case(series(), expect="may", why="the first five steps warm up without outputs", least=6)
class WarmUp(GRUModel):
    washout = 5

    def forward(self, x):
        h, ys = self.start(x), []
        for t in range(x.size(1)):
            h = self.cell(x[:, t], h)
            if t < self.washout:
                continue
            ys.append(self.out(h))
        return torch.stack(ys, 1)


@case(series(), expect="may", why="the body changes after five steps", later=setting(phase=3))
class TwoPhases(GRUModel):
    phase = 5

    def __init__(self):
        super().__init__()
        self.memorize, self.recall = nn.Linear(UNITS, UNITS), nn.Linear(UNITS, UNITS)

    def forward(self, x):
        h = self.start(x)
        for t in range(x.size(1)):
            h = self.cell(x[:, t], h)
            h = torch.tanh(self.memorize(h) if t < self.phase else self.recall(h))
        return h


@case(series(), expect="may", why="the last step is different")
class LastStepApart(GRUModel):
    def __init__(self):
        super().__init__()
        self.last = nn.Linear(UNITS, UNITS)

    def forward(self, x):
        h, T = self.start(x), x.size(1)
        ys = []
        for t in range(T):
            h = self.cell(x[:, t], h)
            if t == T - 1:
                h = self.last(h)
            ys.append(h)
        return torch.stack(ys, 1)


@case(series(), expect="may", why="the index is a number in the step, divided by the number of steps")
class PositionAsNumber(nn.Module):
    def __init__(self):
        super().__init__()
        self.cell = nn.GRUCell(FEATURES + 1, UNITS)

    def forward(self, x):
        T = x.size(1)
        h = x.new_zeros(x.size(0), UNITS)
        for t in range(T):
            pos = t / T
            x_t = torch.cat([x[:, t], torch.full_like(x[:, t, :1], pos)], dim=1)
            h = self.cell(x_t, h)
        return h


@case(series(), expect="may", why="an embedding of the index is added in the step")
class PositionalEmbedding(GRUModel):
    def __init__(self):
        super().__init__()
        self.pos = nn.Embedding(64, FEATURES)

    def forward(self, x):
        h, ys = self.start(x), []
        for t in range(x.size(1)):
            p = self.pos(torch.tensor(t, device=x.device))
            h = self.cell(x[:, t] + p, h)
            ys.append(self.out(h))
        return torch.stack(ys, 1)


@case(series(), expect="may", why="the step is divided by a number that grows with the index")
class RunningMean(GRUModel):
    def forward(self, x):
        h, mean = self.start(x), 0.0
        for t, x_t in enumerate(x.unbind(1)):
            h = self.cell(x_t, h)
            mean = mean + (h - mean) / (t + 1)
        return mean, h


@case(series(), expect="may", why="the loss of each step is discounted by a power of the index")
class DiscountedLoss(GRUModel):
    def forward(self, x):
        h, loss = self.start(x), 0
        for t in range(x.size(1)):
            h = self.cell(x[:, t], h)
            loss = loss + 0.9**t * self.out(h).square().mean()
        return loss


@case(series(), expect="may", why="gradients are cut every fourth step, which no value shows", later=setting(every=2))
class TruncatedEveryFourth(GRUModel):
    every = 4

    def forward(self, x):
        h, ys = self.start(x), []
        for t in range(x.size(1)):
            if t > 0 and t % self.every == 0:
                h = h.detach()
            h = self.cell(x[:, t], h)
            ys.append(h)
        return torch.stack(ys, 1)


@case(series(), expect="may", why="the first steps run without gradients, which no value shows", least=5)
class BurnIn(GRUModel):
    """Recurrent replay: the state is warmed up before gradients begin."""

    burn_in = 4

    def forward(self, x):
        h, qs = self.start(x), []
        for t in range(x.size(1)):
            with torch.set_grad_enabled(t >= self.burn_in and torch.is_grad_enabled()):
                h = self.cell(x[:, t], h)
                qs.append(self.out(h))
        return torch.stack(qs, 1)


@case(series(), expect="may", why="the state is put to zero every fifth step")
class ResetEveryFifth(GRUModel):
    def forward(self, x):
        h, ys = self.start(x), []
        for t in range(x.size(1)):
            if t % 5 == 0:
                h = torch.zeros_like(h)
            h = self.cell(x[:, t], h)
            ys.append(h)
        return torch.stack(ys, 1)


@case(series(), expect="may", why="steps of a set are skipped", later=setting(skipped=(0, 3)))
class SkippedSteps(GRUModel):
    skipped = (2, 4)

    def forward(self, x):
        h = self.start(x)
        for i, x_t in enumerate(x.unbind(1)):
            if i in self.skipped:
                continue
            h = self.cell(x_t, h)
        return h


@case(series(), expect="leave", why="each step has weights of its own: the same code, other parameters")
class UnsharedWeights(nn.Module):
    """Recurrent batch normalization with its own statistics per step is like this too."""

    def __init__(self, longest=16):
        super().__init__()
        self.inp = nn.Linear(FEATURES, UNITS)
        self.steps = nn.ModuleList(nn.Linear(UNITS, UNITS) for _ in range(longest))

    def forward(self, x):
        h = x.new_zeros(x.size(0), UNITS)
        for t in range(x.size(1)):
            h = torch.tanh(self.inp(x[:, t]) + self.steps[t](h))
        return h


@case(series(), expect="may", why="a row of a parameter per step, not of the input")
class ScaledBySchedule(GRUModel):
    def __init__(self):
        super().__init__()
        self.schedule = nn.Parameter(torch.linspace(1.0, 0.5, 32))

    def forward(self, x):
        h = self.start(x)
        for t in range(x.size(1)):
            h = self.cell(x[:, t], self.schedule[t] * h)
        return h


@case(series(), why="two states that swap places in each step")
class PingPong(GRUModel):
    def forward(self, x):
        a = b = self.start(x)
        for x_t in x.unbind(1):
            a, b = b, self.cell(x_t, a)
        return a, b


@case(series(), expect="may", why="ends after so many steps, however many there are", later=setting(max_steps=6))
class AtMostFive(GRUModel):
    max_steps = 5

    def forward(self, x):
        h, ys = self.start(x), []
        for t in range(x.size(1)):
            if t >= self.max_steps:
                break
            h = self.cell(x[:, t], h)
            ys.append(h)
        return torch.stack(ys, 1)


def _with_floats(batch, steps):
    return normal(batch, steps, FEATURES), [0.1 * (1 + t % 3) for t in range(steps)]


@case(_with_floats, expect="may", why="the time between steps is a Python number, another in each step")
class PythonIntervals(GRUModel):
    def forward(self, x, dts):
        h = self.start(x)
        for x_t, dt in zip(x.unbind(1), dts, strict=True):
            h = h + dt * (self.cell(x_t, h) - h)
        return h


@case(series(), expect="may", why="long sequences go through another cell than short ones")
class ByNumberOfSteps(GRUModel):
    def __init__(self):
        super().__init__()
        self.long = nn.GRUCell(FEATURES, UNITS)

    def forward(self, x):
        h = self.start(x)
        for x_t in x.unbind(1):
            h = self.long(x_t, h) if x.size(1) > 10 else self.cell(x_t, h)
        return h


@case(series(), expect="may", why="a small batch is treated otherwise than a big one")
class ByNumberOfRows(GRUModel):
    def forward(self, x):
        h, ys = self.start(x), []
        for x_t in x.unbind(1):
            h = self.cell(x_t, h)
            ys.append(h - h.mean(0) if len(h) > 2 else h)
        return torch.stack(ys, 1)
