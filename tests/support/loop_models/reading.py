"""Forms of a loop, continued: how a step's input is taken out of the sequence."""

from __future__ import annotations

import itertools

import torch
from torch import nn
from torch.nn import functional as F

from .by_index import GRUModel
from .case import FEATURES, UNITS, VOCAB, Family, drawn_tokens, normal, series, tokens, two_series

case = Family("reading")


class Reader(GRUModel):
    """Steps its cell over whatever `steps` yields."""

    def steps(self, x):
        raise NotImplementedError

    def forward(self, x):
        h, ys = self.start(x), []
        for x_t in self.steps(x):
            h = self.cell(x_t, h)
            ys.append(self.out(h))
        return torch.stack(ys, 1)


@case(series())
class BySelect(GRUModel):
    def forward(self, x):
        h = self.start(x)
        for t in range(x.size(1)):
            h = self.cell(x.select(1, t), h)
        return h


@case(series())
class ByNarrow(GRUModel):
    def forward(self, x):
        h = self.start(x)
        for t in range(x.size(1)):
            h = self.cell(torch.narrow(x, 1, t, 1).squeeze(1), h)
        return h


@case(series())
class ByChunk(Reader):
    def steps(self, x):
        return [piece.squeeze(1) for piece in x.chunk(x.size(1), dim=1)]


@case(series())
class ByEllipsis(GRUModel):
    """(batch, feature, time), as convolutions leave it."""

    def forward(self, x):
        x = x.transpose(1, 2).contiguous()
        h = self.start(x)
        for t in range(x.shape[-1]):
            h = self.cell(x[..., t], h)
        return h


@case(series(), expect="may", why="the index is a tensor")
class ByTensorIndex(GRUModel):
    def forward(self, x):
        h, ys = self.start(x), []
        for t in torch.arange(x.size(1)):
            h = self.cell(x[:, t], h)
            ys.append(h)
        return torch.stack(ys, 1)


@case(series(), expect="may", why="steps are looked up by lists and index tensors")
class ByIndexSelect(GRUModel):
    def forward(self, x):
        h = self.start(x)
        for t in range(x.size(1)):
            h = self.cell(x.index_select(1, torch.tensor([t]))[:, 0] + x[:, [t]].squeeze(1), h)
        return h


@case(series(), expect="may", why="an iterator, advanced by hand")
class ByNext(GRUModel):
    def forward(self, x):
        h, steps = self.start(x), iter(x.unbind(1))
        while (x_t := next(steps, None)) is not None:
            h = self.cell(x_t, h)
        return h


@case(series())
class ByReversedList(Reader):
    def steps(self, x):
        return reversed(x.unbind(1))


@case(series())
class ByFlip(GRUModel):
    """The input is flipped before the loop, the output after it."""

    def forward(self, x):
        x = x.flip(dims=[1])
        h, ys = self.start(x), []
        for t in range(x.size(1)):
            h = self.cell(x[:, t], h)
            ys.append(h)
        return torch.stack(ys, 1).flip(1)


@case(series())
class BySlicedRange(GRUModel):
    """Starts from the first input and goes over the others."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(FEATURES, UNITS)

    def forward(self, x):
        h = self.first(x[:, 0])
        ys = [h]
        for t in range(1, x.size(1)):
            h = self.cell(x[:, t], h)
            ys.append(h)
        return torch.stack(ys, dim=1)


@case(series(), least=2)
class ByPairs(GRUModel):
    """Differences of neighbours, by itertools.pairwise."""

    def forward(self, x):
        h = self.start(x)
        for before, after in itertools.pairwise(x.unbind(1)):
            h = self.cell(after - before, h)
        return h


@case(series())
class ByAccumulate(GRUModel):
    """The loop is itertools.accumulate."""

    def forward(self, x):
        states = itertools.accumulate(x.unbind(1), lambda h, x_t: self.cell(x_t, h), initial=self.start(x))
        return torch.stack(list(states)[1:], 1)


@case(two_series)
class OfADict(nn.Module):
    """A dict of series, the same keys in each step."""

    def __init__(self):
        super().__init__()
        self.embed = nn.ModuleDict({"obs": nn.Linear(FEATURES, 8), "action": nn.Linear(3, 8)})
        self.cell = nn.GRUCell(16, UNITS)

    def forward(self, obs, action):
        batch = {"obs": obs, "action": action}
        h = obs.new_zeros(obs.size(0), UNITS)
        for t in range(obs.size(1)):
            step = {name: value[:, t] for name, value in batch.items()}
            h = self.cell(torch.cat([F.relu(self.embed[name](step[name])) for name in sorted(step)], -1), h)
        return h


@case(lambda batch, steps: ([normal(batch, FEATURES, salt=t) for t in range(steps)],))
class OfAList(Reader):
    """The caller gives a list of steps."""

    def forward(self, frames):
        h = None
        for frame in frames:
            h = self.cell(frame, h)
        return h


@case(tokens())
class OneHotWithin(nn.Module):
    """Tokens are embedded within the step, by one_hot and a product, and by F.embedding."""

    def __init__(self):
        super().__init__()
        self.table, self.codes = nn.Parameter(torch.randn(VOCAB, 4)), nn.Parameter(torch.randn(VOCAB, 4))
        self.cell = nn.GRUCell(8, UNITS)

    def forward(self, idx):
        h = self.table.new_zeros(len(idx), UNITS)
        for t in range(idx.shape[1]):
            one = F.one_hot(idx[:, t], num_classes=VOCAB).to(self.table.dtype) @ self.table
            h = self.cell(torch.cat([one, F.embedding(idx[:, t], self.codes)], dim=1), h)
        return h


@case(lambda batch, steps: (normal(batch, steps, 1, 6, 6),))
class FrameEncoder(nn.Module):
    """A convolutional encoder within the step: nothing of it depends on the state."""

    def __init__(self):
        super().__init__()
        self.cnn = nn.Sequential(nn.Conv2d(1, 3, 3, stride=2), nn.ReLU(), nn.Flatten(), nn.Linear(12, FEATURES))
        self.lstm, self.fc = nn.LSTMCell(FEATURES, UNITS), nn.Linear(UNITS, 3)

    def forward(self, video):
        hx = cx = video.new_zeros(video.size(0), UNITS)
        for t in range(video.size(1)):
            features = self.cnn(video[:, t])
            hx, cx = self.lstm(features, (hx, cx))
        return self.fc(hx)


@case(series(), expect="may", why="pieces of four steps through a fused layer, the last piece may be shorter")
class ByPieces(nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn = nn.GRU(FEATURES, UNITS, batch_first=True)

    def forward(self, x):
        h, ys = None, []
        for piece in x.split(4, dim=1):
            y, h = self.rnn(piece, h)
            ys.append(y)
        return torch.cat(ys, 1)


@case(lambda batch, steps: (normal(steps, FEATURES),))
class SingleSequence(nn.Module):
    """No batch at all: states of rank one, matrix times vector."""

    def __init__(self):
        super().__init__()
        self.W, self.U = nn.Parameter(torch.randn(UNITS, FEATURES) * 0.3), nn.Parameter(torch.randn(UNITS, UNITS) * 0.3)

    def forward(self, xs):
        h = xs.new_zeros(UNITS)
        hs = []
        for x in xs:
            h = torch.tanh(torch.mv(self.W, x) + self.U @ h)
            hs.append(h)
        return torch.stack(hs)


@case(lambda batch, steps: (normal(steps, batch, steps),))
class SquareInput(nn.Module):
    """As many features as steps: nothing but the code says which axis is time."""

    def __init__(self):
        super().__init__()
        self.u = nn.Linear(1, 1)

    def forward(self, x):
        h = torch.zeros_like(x[0])
        for row in x:
            h = torch.tanh(self.u(h.unsqueeze(-1)).squeeze(-1) + row)
        return h


@case(lambda batch, steps: (normal(batch, steps, FEATURES), drawn_tokens(batch, steps), normal(batch, 4, salt=1)))
class ManySources(nn.Module):
    """A series, tokens of the same time, and something that is the same in all steps."""

    def __init__(self):
        super().__init__()
        self.emb, self.static = nn.Embedding(VOCAB, 5), nn.Linear(4, 5)
        self.cell = nn.LSTMCell(FEATURES + 10, UNITS)

    def forward(self, x, idx, static):
        context, state, ys = self.static(static), None, []
        for t, (x_t, tok) in enumerate(zip(x.unbind(1), idx.unbind(1), strict=True)):
            assert t < x.size(1)
            state = self.cell(torch.cat([x_t, self.emb(tok), context], -1), state)
            ys.append(state[0])
        return torch.stack(ys, 1)
