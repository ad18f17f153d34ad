"""Several cells or loops in one model: stacks, directions, pairs, layers of one's own inside bigger nets."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .case import FEATURES, UNITS, VOCAB, Family, series, series_and_lengths, source_and_target, tokens

case = Family("stacks")


@case(series())
class SineForecaster(nn.Module):
    """Two LSTM cells within each step, as in the time-series example of torch, for given inputs only."""

    def __init__(self):
        super().__init__()
        self.lstm1, self.lstm2 = nn.LSTMCell(FEATURES, UNITS), nn.LSTMCell(UNITS, UNITS)
        self.linear = nn.Linear(UNITS, 1)

    def forward(self, input):
        outputs = []
        h_t = torch.zeros(input.size(0), UNITS, dtype=input.dtype)
        c_t = torch.zeros(input.size(0), UNITS, dtype=input.dtype)
        h_t2 = torch.zeros(input.size(0), UNITS, dtype=input.dtype)
        c_t2 = torch.zeros(input.size(0), UNITS, dtype=input.dtype)
        for input_t in input.split(1, dim=1):
            h_t, c_t = self.lstm1(input_t.squeeze(1), (h_t, c_t))
            h_t2, c_t2 = self.lstm2(h_t, (h_t2, c_t2))
            output = self.linear(h_t2)
            outputs += [output]
        return torch.cat(outputs, dim=1)


@case(series())
class LayersWithinTime(nn.Module):
    """A list of states, replaced item by item."""

    def __init__(self, num_layers=3):
        super().__init__()
        sizes = [FEATURES] + [UNITS] * num_layers
        self.layers = nn.ModuleList(nn.GRUCell(a, b) for a, b in pairwise(sizes))
        self.dropout = nn.Dropout(0.0)

    def forward(self, x):
        hidden = [x.new_zeros(x.size(0), UNITS) for _ in self.layers]
        outputs = []
        for t in range(x.size(1)):
            inp = x[:, t]
            for i, layer in enumerate(self.layers):
                hidden[i] = layer(inp, hidden[i])
                inp = self.dropout(hidden[i])
            outputs.append(inp)
        return torch.stack(outputs, 1), torch.stack(hidden)


@case(series())
class TimeWithinLayers(nn.Module):
    """Each layer goes over the list that the one before it left."""

    def __init__(self, num_layers=2):
        super().__init__()
        self.cells = nn.ModuleList(nn.LSTMCell(FEATURES if i == 0 else UNITS, UNITS) for i in range(num_layers))

    def forward(self, x):
        seq, finals = list(x.unbind(1)), []
        for cell in self.cells:
            state, out = None, []
            for x_t in seq:
                state = cell(x_t, state)
                out.append(state[0])
            seq = out
            finals.append(state)
        return torch.stack(seq, 1), finals


class MyGRU(nn.Module):
    """The layer people write when they want a GRU of their own."""

    def __init__(self, input_size: int, hidden_size: int, reverse: bool = False) -> None:
        super().__init__()
        self.hidden_size, self.reverse = hidden_size, reverse
        self.x2h = nn.Linear(input_size, 3 * hidden_size)
        self.h2h = nn.Linear(hidden_size, 3 * hidden_size)

    def cell(self, x: Tensor, h: Tensor) -> Tensor:
        i_r, i_i, i_n = self.x2h(x).chunk(3, 1)
        h_r, h_i, h_n = self.h2h(h).chunk(3, 1)
        resetgate = torch.sigmoid(i_r + h_r)
        inputgate = torch.sigmoid(i_i + h_i)
        newgate = torch.tanh(i_n + resetgate * h_n)
        return newgate + inputgate * (h - newgate)

    def forward(self, x: Tensor, h: Tensor | None = None) -> tuple[Tensor, Tensor]:
        if h is None:
            h = x.new_zeros(x.size(0), self.hidden_size)
        times = range(x.size(1) - 1, -1, -1) if self.reverse else range(x.size(1))
        outs: list[Tensor] = []
        for t in times:
            h = self.cell(x[:, t], h)
            outs.append(h)
        if self.reverse:
            outs.reverse()
        return torch.stack(outs, dim=1), h


@case(series())
class TwoHeads(nn.Module):
    """A layer of one's own between an encoder and two heads."""

    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(FEATURES, UNITS), nn.ReLU(), nn.LayerNorm(UNITS))
        self.rnn = MyGRU(UNITS, UNITS)
        self.policy, self.value = nn.Linear(UNITS, 4), nn.Linear(UNITS, 1)

    def forward(self, obs):
        y, h = self.rnn(self.encoder(obs))
        return {"logits": self.policy(y), "value": self.value(y).squeeze(-1), "state": h}


@case(series(UNITS))
class SharedLayer(nn.Module):
    """The same layer twice, the second time on what it gave, with a skip connection."""

    def __init__(self):
        super().__init__()
        self.rnn = MyGRU(UNITS, UNITS)

    def forward(self, x):
        y, h = self.rnn(x)
        z, h = self.rnn(y + x, h)
        return z, h


@case(tokens())
class BiGRUTagger(nn.Module):
    """Both directions, each an instance; the second goes over the indices backwards."""

    def __init__(self):
        super().__init__()
        self.emb = nn.Embedding(VOCAB, FEATURES)
        self.fwd, self.bwd = MyGRU(FEATURES, 8), MyGRU(FEATURES, 8, reverse=True)
        self.out = nn.Linear(16, 5)

    def forward(self, words):
        e = self.emb(words)
        return self.out(torch.cat([self.fwd(e)[0], self.bwd(e)[0]], dim=-1))


@case(series())
class BothWaysInOneLoop(nn.Module):
    """One loop steps both directions: x[t] there and x[T-1-t] back; torch.flip puts the second in order."""

    def __init__(self):
        super().__init__()
        self.f, self.b = nn.RNNCell(FEATURES, UNITS), nn.RNNCell(FEATURES, UNITS)

    def forward(self, x):
        T = x.size(1)
        hf = hb = torch.zeros(x.size(0), UNITS, dtype=x.dtype)
        there, back = [], []
        for t in range(T):
            hf = self.f(x[:, t], hf)
            hb = self.b(x[:, T - 1 - t], hb)
            there.append(hf)
            back.append(hb)
        return torch.cat([torch.stack(there, 1), torch.flip(torch.stack(back, 1), [1])], -1)


@case(source_and_target)
class Seq2Seq(nn.Module):
    """Encoder and decoder loops of different lengths; the decoder reads the right tokens of before."""

    def __init__(self):
        super().__init__()
        self.src_emb, self.trg_emb = nn.Embedding(VOCAB, FEATURES), nn.Embedding(VOCAB, FEATURES)
        self.encoder, self.decoder = nn.GRUCell(FEATURES, UNITS), nn.GRUCell(FEATURES, UNITS)
        self.out = nn.Linear(UNITS, VOCAB)

    def forward(self, src, trg):
        hidden = self.out.weight.new_zeros(src.shape[0], UNITS)
        for i in range(src.shape[1]):
            hidden = self.encoder(self.src_emb(src[:, i]), hidden)
        logits = []
        for t in range(trg.shape[1] - 1):
            hidden = self.decoder(self.trg_emb(trg[:, t]), hidden)
            logits.append(self.out(hidden))
        return torch.stack(logits, 1)


@case(series())
class TwoCellsInConversation(nn.Module):
    """Each cell reads what the other said; the order within the step matters."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.GRUCell(FEATURES + 8, UNITS), nn.GRUCell(FEATURES + UNITS, 8)

    def forward(self, x):
        ha, hb = x.new_zeros(x.size(0), UNITS), x.new_zeros(x.size(0), 8)
        said = []
        for x_t in x.unbind(1):
            ha = self.a(torch.cat([x_t, hb], 1), ha)
            hb = self.b(torch.cat([x_t, ha], 1), hb)
            said.append((ha, hb))
        a, b = zip(*said, strict=True)
        return torch.stack(a, 1), torch.stack(b, 1)


@case(series())
class LoopAfterLoop(nn.Module):
    """The second loop uses the first one's list, backwards, beside the input."""

    def __init__(self):
        super().__init__()
        self.bottom, self.top = nn.RNNCell(FEATURES, UNITS), nn.RNNCell(FEATURES + UNITS, UNITS)

    def forward(self, x):
        h = None
        lower = []
        for t in range(x.shape[1]):
            h = self.bottom(x[:, t], h)
            lower.append(h)
        g = h
        upper = [None] * len(lower)
        for t in reversed(range(len(lower))):
            g = self.top(torch.cat([x[:, t], lower[t]], dim=-1), g)
            upper[t] = g
        return torch.stack(upper, 1)


@case(series())
class ResidualStack(nn.Module):
    """Pre-norm blocks, each with a loop of its own in forward; dense layers between."""

    def __init__(self, depth=2):
        super().__init__()
        self.inp = nn.Linear(FEATURES, UNITS)
        self.blocks = nn.ModuleList(ResidualBlock() for _ in range(depth))

    def forward(self, x):
        x = self.inp(x)
        for block in self.blocks:
            x = block(x)
        return x


class ResidualBlock(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.rnn = nn.LayerNorm(UNITS), nn.GRUCell(UNITS, UNITS)
        self.mlp = nn.Sequential(
            nn.LayerNorm(UNITS), nn.Linear(UNITS, 2 * UNITS), nn.GELU(), nn.Linear(2 * UNITS, UNITS)
        )

    def forward(self, x):
        y, h = self.norm(x), torch.zeros_like(x[:, 0])
        out = torch.empty_like(x)
        for t in range(x.shape[1]):
            h = self.rnn(y[:, t], h)
            out[:, t] = h
        x = x + out
        return x + self.mlp(x)


@case(series())
class ResidualCell(nn.Module):
    """The state is added to, normalized and never replaced; two experts are mixed by a gate of both."""

    def __init__(self):
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(FEATURES + UNITS, UNITS) for _ in range(2))
        self.gate = nn.Linear(FEATURES + UNITS, 2)
        self.norm = nn.LayerNorm(UNITS, elementwise_affine=False)

    def forward(self, x):
        h = x.new_zeros(x.size(0), UNITS)
        for t in range(x.size(1)):
            xh = torch.cat([x[:, t], h], -1)
            weights = F.softmax(self.gate(xh), dim=-1)
            update = torch.stack([torch.tanh(expert(xh)) for expert in self.experts], dim=-1)
            h = self.norm(h + (update * weights[:, None, :]).sum(-1))
        return h


@case(series_and_lengths)
class MaskedByLength(nn.Module):
    """Rows that have ended keep their state and give zeros."""

    def __init__(self):
        super().__init__()
        self.cell = nn.LSTMCell(FEATURES, UNITS)

    def forward(self, x, lengths):
        max_len = x.size(1)
        mask = (torch.arange(max_len)[None, :] < lengths[:, None]).to(x.dtype)
        h, c = x.new_zeros(x.size(0), UNITS), x.new_zeros(x.size(0), UNITS)
        outputs = []
        for t in range(max_len):
            m = mask[:, t].unsqueeze(1)
            h_next, c_next = self.cell(x[:, t], (h, c))
            h = m * h_next + (1 - m) * h
            c = m * c_next + (1 - m) * c
            outputs.append(h * m)
        return torch.stack(outputs, dim=1), (h, c)


@case(series_and_lengths, expect="may", why="the index is a number in the step, compared with a tensor")
class MaskedWithinTheLoop(nn.Module):
    """The comparison with the length is in the loop: `t` is a number in the step, and nowhere else."""

    def __init__(self):
        super().__init__()
        self.cell = nn.GRUCell(FEATURES, UNITS)

    def forward(self, x, lengths):
        h = x.new_zeros(x.size(0), UNITS)
        for t, x_t in enumerate(x.unbind(1)):
            h = torch.where((t < lengths).unsqueeze(-1), self.cell(x_t, h), h)
        return h


class Zoneout(nn.Module):
    def __init__(self, p=0.15):
        super().__init__()
        self.cell, self.p = nn.LSTMCell(FEATURES, UNITS), p

    def zoneout(self, old, new):
        if self.training:
            keep = torch.bernoulli(torch.full_like(old, self.p))
            return keep * old + (1 - keep) * new
        return self.p * old + (1 - self.p) * new

    def forward(self, x):
        h, c = (x.new_zeros(x.size(0), UNITS) for _ in range(2))
        ys = []
        for x_t in x.unbind(1):
            h_new, c_new = self.cell(x_t, (h, c))
            h, c = self.zoneout(h, h_new), self.zoneout(c, c_new)
            ys.append(h)
        return torch.stack(ys, 1)


case(series(), name="zoneout_in_training", doubles=False)(Zoneout)
case(series(), name="zoneout_at_rest", builder=lambda: Zoneout().eval())(Zoneout)


@case(series(), doubles=False)
class VariationalDropout(nn.Module):
    """One mask per sequence, drawn before the loop, on inputs and state."""

    def __init__(self, p=0.25):
        super().__init__()
        self.cell, self.p = nn.GRUCell(FEATURES, UNITS), p

    def forward(self, x):
        h = x.new_zeros(x.size(0), UNITS)
        mask_x = F.dropout(torch.ones(x.size(0), FEATURES), self.p, self.training)
        mask_h = F.dropout(torch.ones(x.size(0), UNITS), self.p, self.training)
        out = []
        for t in range(x.size(1)):
            h = self.cell(x[:, t] * mask_x, h * mask_h)
            out.append(h)
        return torch.stack(out, 1)


@case(series(), expect="may", why="the slow cell runs every third step: a period of three, or a body that changes")
class ClockworkPair(nn.Module):
    def __init__(self, every=3):
        super().__init__()
        self.fast, self.slow = nn.GRUCell(FEATURES + UNITS, UNITS), nn.GRUCell(UNITS, UNITS)
        self.every = every

    def forward(self, x):
        fast = slow = x.new_zeros(x.size(0), UNITS)
        outs = []
        for t in range(x.size(1)):
            if t % self.every == 0:
                slow = self.slow(fast, slow)
            fast = self.fast(torch.cat([x[:, t], slow], -1), fast)
            outs.append(fast)
        return torch.stack(outs, 1), slow
