"""Idioms and manners of code around a loop: old style, functional style, instruments, objects as states."""

from __future__ import annotations

import functools
import io
import time
from contextlib import redirect_stdout

import torch
from torch import nn
from torch.autograd import Variable
from torch.nn import functional as F

from .by_index import GRUModel
from .case import FEATURES, UNITS, VOCAB, Family, series, setting, tokens
from .effects import Stepped

case = Family("manners")


@case(tokens())
class OldStyleCharRNN(nn.Module):
    """Code of 2017: Variables, a device by hand, init_hidden as a method, view before the decoder."""

    def __init__(self):
        super().__init__()
        self.n_layers, self.hidden_size = 1, UNITS
        self.device = torch.device("cpu")
        self.encoder, self.gru = nn.Embedding(VOCAB, UNITS), nn.GRU(UNITS, UNITS, 1)
        self.decoder = nn.Linear(UNITS, VOCAB)

    def init_hidden(self, batch_size):
        return Variable(torch.zeros(self.n_layers, batch_size, self.hidden_size)).to(self.decoder.weight)

    def step(self, input, hidden):
        batch_size = input.size(0)
        encoded = self.encoder(input)
        output, hidden = self.gru(encoded.view(1, batch_size, -1), hidden)
        output = self.decoder(output.view(batch_size, -1))
        return output, hidden

    def forward(self, inp):
        hidden = self.init_hidden(inp.size(0)).to(self.device)
        loss = 0
        for c in range(inp.size(1)):
            output, hidden = self.step(inp[:, c], hidden)
            loss += F.cross_entropy(output.view(inp.size(0), -1), inp[:, c])
        return loss / inp.size(1)


@case(series())
class Reduced(GRUModel):
    """The loop is functools.reduce."""

    def forward(self, x):
        return functools.reduce(lambda h, x_t: self.cell(x_t, h), x.unbind(1), self.start(x))


@case(series())
class Comprehended(GRUModel):
    """The loop is a comprehension with a walrus."""

    def forward(self, x):
        h = self.start(x)
        return torch.stack([h := self.cell(x_t, h) for x_t in x.unbind(1)], 1)


@case(series())
class PartialStep(GRUModel):
    """The step is a partial function with keyword arguments."""

    @staticmethod
    def update(x_t, *, h, cell, leak=0.5, **unused):
        return h + leak * (cell(x_t, h) - h)

    def forward(self, x):
        step = functools.partial(self.update, cell=self.cell, leak=0.3, verbose=False)
        h = self.start(x)
        for x_t in x.unbind(1):
            h = step(x_t, h=h)
        return h


class Memory:
    """A mutable object made in forward, which the step writes to."""

    def __init__(self, like):
        self.short, self.long = torch.zeros_like(like), torch.zeros_like(like)

    def write(self, value, rate):
        self.short = value
        self.long = self.long + rate * (value - self.long)

    def read(self):
        return torch.cat([self.short, self.long], -1)


@case(series(), expect="may", why="the state is held by an object of a plain class, changed by its methods")
class ObjectAsState(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Linear(FEATURES + 2 * UNITS, UNITS)

    def forward(self, x):
        memory, ys = Memory(x.new_zeros(x.size(0), UNITS)), []
        for x_t in x.unbind(1):
            memory.write(torch.tanh(self.w(torch.cat([x_t, memory.read()], -1))), rate=0.1)
            ys.append(memory.read())
        return torch.stack(ys, 1)


@case(series(), expect="may", why="the cell module keeps the state in itself; reset makes it new")
class SelfKeepingCell(nn.Module):
    """As spiking libraries do: the layer holds its voltage, the net resets all layers and then calls them in a loop."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(FEATURES, UNITS), LeakyVoltage(), nn.Linear(UNITS, 3), LeakyVoltage())

    def forward(self, x):
        for layer in self.layers:
            if isinstance(layer, LeakyVoltage):
                layer.v = None
        out = []
        for t in range(x.size(1)):
            out.append(self.layers(x[:, t]))
        return torch.stack(out).mean(0)


class LeakyVoltage(nn.Module):
    v = None

    def forward(self, current):
        self.v = current if self.v is None else 0.8 * self.v + current
        return torch.sigmoid(4 * (self.v - 1))


def _quietly(model, x):
    with redirect_stdout(io.StringIO()) as lines:
        y = model(x)
    return y, lines.getvalue()


@case(series(), why="prints once it is asked to", call=_quietly, later=setting(verbose=True))
class PrintsIfAsked(Stepped):
    verbose = False

    def step(self, x_t, h):
        if self.verbose:
            print("a step of", len(x_t), "rows")
        return self.cell(x_t, h)


@case(series(), expect="leave", why="notes when each step ran", seen=lambda model: len(model.times))
class TimesItself(Stepped):
    def __init__(self):
        super().__init__()
        self.times = []

    def step(self, x_t, h):
        self.times.append(time.perf_counter())
        return self.cell(x_t, h)


class Progress:
    """A bar such as tqdm: an iterable that counts what went through it."""

    total = 0

    def __init__(self, steps):
        self.steps = steps

    def __iter__(self):
        for step in self.steps:
            yield step
            Progress.total += 1


@case(series(), expect="may", why="a progress bar around the range counts steps", seen=lambda model: model.counted)
class ShowsProgress(Stepped):
    def forward(self, x):
        Progress.total = 0
        h = self.start(x)
        for t in Progress(range(x.size(1))):
            h = self.cell(x[:, t], h)
        self.counted = Progress.total
        return h


@case(series(), expect="may", why="each step is labeled for the profiler")
class LabeledSteps(Stepped):
    def step(self, x_t, h):
        with torch.profiler.record_function("step"):
            return self.cell(x_t, h)


@case(series(), expect="may", why="the step is kept from the compiler")
class KeptFromTheCompiler(Stepped):
    @torch.compiler.disable
    def step(self, x_t, h):
        return self.cell(x_t, h)


@case(series(), expect="leave", why="a loss is added up in Python, for the log", seen=lambda model: model.logged)
class LogsItsLoss(Stepped):
    def forward(self, x):
        h, loss, self.logged = self.start(x), 0, 0.0
        for x_t in x.unbind(1):
            h = self.cell(x_t, h)
            step_loss = self.out(h).square().mean()
            loss = loss + step_loss
            self.logged += step_loss.item()
        return loss


@case(series(), expect="leave", why="counts in Python what the data say")
class CountsInPython(Stepped):
    def forward(self, x):
        h, positive = self.start(x), 0
        for x_t in x.unbind(1):
            h = self.cell(x_t, h)
            positive += int((h > 0).sum())
        return h, positive


@case(
    series(), expect="leave", why="the gradient of each state is kept for later", seen=lambda model: len(model.states)
)
class KeepsGradients(Stepped):
    def forward(self, x):
        h, self.states = self.start(x), []
        for x_t in x.unbind(1):
            h = self.cell(x_t, h)
            if h.requires_grad:
                h.retain_grad()
            self.states.append(h)
        return self.out(h)


@case(series(), expect="may", why="the state goes on as .data, as old code cuts gradients")
class CutByData(Stepped):
    def forward(self, x):
        h, ys = self.start(x), []
        for x_t in x.unbind(1):
            h = self.cell(x_t, h.data)
            ys.append(h)
        return torch.stack(ys, 1)


@case(series(), why="noise on input and on state, drawn in turn, and some before and after the loop", doubles=False)
class NoiseEverywhere(Stepped):
    def forward(self, x):
        h = 0.1 * torch.randn(x.size(0), UNITS)
        for x_t in x.unbind(1):
            x_t = x_t + 0.1 * torch.randn_like(x_t)
            h = self.cell(x_t, h + 0.1 * torch.rand_like(h))
        return h + 0.01 * torch.randn_like(h)


@case(series(), why="a choice by gumbel softmax in each step", doubles=False)
class GumbelChoice(Stepped):
    def step(self, x_t, h):
        choice = F.gumbel_softmax(self.out(h), tau=0.7, hard=True)
        return choice[:, :1] * self.cell(x_t, h) + choice[:, 1:] * h


@case(series(), expect="may", why="the features are shuffled anew in each step", doubles=False)
class ShuffledFeatures(Stepped):
    def step(self, x_t, h):
        return self.cell(x_t[:, torch.randperm(FEATURES)], h)


@case(series(), expect="may", why="the recurrent weight is a sparse matrix")
class SparseReservoir(nn.Module):
    def __init__(self):
        super().__init__()
        w = torch.randn(UNITS, UNITS) * (torch.rand(UNITS, UNITS) < 0.2)
        self.register_buffer("w", w.to_sparse())
        self.inp, self.readout = nn.Linear(FEATURES, UNITS), nn.Linear(UNITS, 2)

    def forward(self, x):
        h, ys = x.new_zeros(x.size(0), UNITS), []
        for x_t in x.unbind(1):
            h = torch.tanh(self.inp(x_t) + torch.sparse.mm(self.w, h.t()).t())
            ys.append(self.readout(h))
        return torch.stack(ys, 1)
