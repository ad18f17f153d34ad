"""Forms of a loop: how time is gone through, what holds the state, and how the outputs are collected."""

from __future__ import annotations

from collections import namedtuple
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .case import FEATURES, UNITS, VOCAB, Family, drawn_tokens, normal, series, time_first, tokens, two_series

case = Family("forms")


class LSTMState(NamedTuple):
    hx: Tensor
    cx: Tensor


@case(series())
class NamedTupleState(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(FEATURES + UNITS, 4 * UNITS)

    def step(self, x: Tensor, state: LSTMState) -> LSTMState:
        i, f, g, o = self.linear(torch.cat([x, state.hx], -1)).chunk(4, -1)
        cx = f.sigmoid() * state.cx + i.sigmoid() * g.tanh()
        return LSTMState(hx=o.sigmoid() * cx.tanh(), cx=cx)

    def forward(self, x: Tensor) -> tuple[Tensor, LSTMState]:
        zeros = x.new_zeros(x.size(0), UNITS)
        state = LSTMState(zeros, zeros)
        out = []
        for t in range(x.size(1)):
            state = self.step(x[:, t], state)
            out.append(state.hx)
        return torch.stack(out, 1), state


@dataclass
class Belief:
    mean: Tensor
    log_var: Tensor
    steps: Tensor


@case(series())
class DataclassState(nn.Module):
    """A belief that is replaced field by field, and a counter of no dimension that the step divides by."""

    def __init__(self):
        super().__init__()
        self.update = nn.Linear(FEATURES + 2 * UNITS, 2 * UNITS)

    def forward(self, x):
        belief = Belief(x.new_zeros(x.size(0), UNITS), x.new_zeros(x.size(0), UNITS), torch.tensor(0, dtype=torch.long))
        trace = []
        for x_t in x.unbind(1):
            delta_mean, delta_var = self.update(torch.cat([x_t, belief.mean, belief.log_var], -1)).chunk(2, -1)
            count = belief.steps + 1
            belief = replace(
                belief,
                mean=belief.mean + torch.tanh(delta_mean) / count,
                log_var=0.9 * belief.log_var + 0.1 * torch.tanh(delta_var),
                steps=count,
            )
            trace.append(belief.mean)
        return torch.stack(trace, 1), belief.log_var, belief.steps


@case(series())
class DictState(nn.Module):
    """A dict that is written into, key by key."""

    def __init__(self):
        super().__init__()
        self.cells = nn.ModuleDict({"low": nn.GRUCell(FEATURES, UNITS), "high": nn.GRUCell(UNITS, UNITS)})

    def forward(self, x):
        state = {name: x.new_zeros(x.size(0), UNITS) for name in self.cells}
        collected = {name: [] for name in self.cells}
        for x_t in x.unbind(1):
            inp = x_t
            for name, cell in self.cells.items():
                state[name] = cell(inp, state[name])
                collected[name].append(state[name])
                inp = state[name]
        return {name: torch.stack(rows, dim=1) for name, rows in collected.items()}


Output = namedtuple("Output", ["y", "attention", "gate"])


@case(two_series)
class SeveralOutputs(nn.Module):
    """Three lists of different shapes, one of rank 1 rows, two inputs by zip and enumerate."""

    def __init__(self):
        super().__init__()
        self.cell, self.score, self.gate = nn.GRUCell(FEATURES, UNITS), nn.Linear(UNITS, 3), nn.Linear(UNITS, 1)

    def forward(self, x, extra):
        h = x.new_zeros(x.shape[0], UNITS)
        ys, attentions, gates = [], [], []
        for t, (x_t, e_t) in enumerate(zip(x.unbind(1), extra.unbind(1), strict=True)):
            del t
            h = self.cell(x_t, h)
            attention = F.softmax(self.score(h) + e_t, -1)
            gate = torch.sigmoid(self.gate(h)).squeeze(-1)
            ys.append(h * gate[:, None])
            attentions.append(attention)
            gates.append(gate)
        return Output(torch.stack(ys, 1), torch.stack(attentions, 1), torch.stack(gates, 1))


@case(series())
class SumOverTime(nn.Module):
    """Nothing is collected: a sum, a maximum and a penalty run along."""

    def __init__(self):
        super().__init__()
        self.cell = nn.RNNCell(FEATURES, UNITS, nonlinearity="relu")

    def forward(self, x):
        h, total, penalty = None, 0, 0.0
        top = x.new_full((x.size(0), UNITS), float("-inf"))
        for t in range(x.size(1)):
            h = self.cell(x[:, t], h)
            total += h
            top = torch.max(top, h)
            penalty = penalty + h.pow(2).mean()
        return total / x.size(1), top, penalty


@case(tokens(), least=2)
class LossInTheLoop(nn.Module):
    """Cross entropy step by step, as the char-rnn tutorials train."""

    def __init__(self):
        super().__init__()
        self.i2h, self.h2o = nn.Linear(VOCAB + UNITS, UNITS), nn.Linear(UNITS, VOCAB)

    def forward(self, line):
        hidden = self.h2o.weight.new_zeros(line.size(0), UNITS)
        loss = self.h2o.weight.new_zeros(())
        for i in range(line.size(1) - 1):
            one_hot = F.one_hot(line[:, i], VOCAB).to(hidden.dtype)
            hidden = torch.tanh(self.i2h(torch.cat((one_hot, hidden), 1)))
            loss = loss + F.nll_loss(F.log_softmax(self.h2o(hidden), dim=1), line[:, i + 1])
        return loss / max(line.size(1) - 1, 1)


@case(series())
class WhileLoop(nn.Module):
    def __init__(self):
        super().__init__()
        self.cell = nn.GRUCell(FEATURES, UNITS)

    def forward(self, x):
        t, h, ys = 0, torch.zeros(x.size(0), UNITS, dtype=x.dtype), []
        while t < x.size(1):
            h = self.cell(x[:, t], h)
            ys.append(h)
            t += 1
        return torch.stack(ys, 1)


@case(time_first())
class CatOfUnsqueezed(nn.Module):
    """Outputs by `cat` of (1, batch, unit) pieces that were sliced, not indexed."""

    def __init__(self):
        super().__init__()
        self.rnn = nn.RNN(FEATURES, UNITS)

    def forward(self, x):
        h, out = None, []
        for i in range(x.size(0)):
            o, h = self.rnn(x[i : i + 1], h)
            out.append(o)
        return torch.cat(out, 0), h


@case(series())
class GrownByCat(nn.Module):
    """The output grows by cat in each step, from an empty tensor; the state does not read it."""

    def __init__(self):
        super().__init__()
        self.cell = nn.GRUCell(FEATURES, UNITS)

    def forward(self, x):
        h = torch.zeros(x.size(0), UNITS).type_as(x)
        out = torch.empty(x.size(0), 0, UNITS).type_as(x)
        for t in range(x.size(1)):
            h = self.cell(x[:, t], h)
            out = torch.cat([out, h.unsqueeze(1)], dim=1)
        return out


@case(series())
class WrittenByIndex(nn.Module):
    """Rows of (time, batch, unit) written by index, states and outputs, then permuted."""

    def __init__(self):
        super().__init__()
        self.A, self.B = nn.Parameter(torch.randn(UNITS, UNITS) * 0.2), nn.Parameter(torch.randn(UNITS, FEATURES) * 0.3)
        self.C = nn.Parameter(torch.randn(2, UNITS) * 0.3)

    def forward(self, u):
        T = u.size(1)
        x = torch.zeros(T + 1, u.size(0), UNITS, dtype=u.dtype)
        y = torch.zeros(T, u.size(0), 2, dtype=u.dtype)
        state = x[0].clone()
        for k in range(T):
            state = torch.tanh(state @ self.A.T + u[:, k] @ self.B.T)
            x[k + 1] = state
            y[k] = state @ self.C.T
        return y.permute(1, 0, 2), x.permute(1, 0, 2)


@case(series())
class StateInsideTheTensor(nn.Module):
    """The state of before is read back from the list of outputs, by [-1]."""

    def __init__(self):
        super().__init__()
        self.w, self.u = nn.Linear(FEATURES, UNITS), nn.Linear(UNITS, UNITS, bias=False)

    def forward(self, x):
        hs = [torch.zeros(x.size(0), UNITS, dtype=x.dtype)]
        for x_t in x.unbind(1):
            hs.append(torch.tanh(self.w(x_t) + self.u(hs[-1])))
        return torch.stack(hs[1:], 1)


@case(series())
class TruncatedGradient(nn.Module):
    """The memory is detached on its way; the state is not."""

    def __init__(self):
        super().__init__()
        self.cell, self.write = nn.GRUCell(FEATURES + UNITS, UNITS), nn.Linear(UNITS, UNITS)

    def forward(self, x):
        h = mem = x.new_zeros(x.size(0), UNITS)
        ys = []
        for x_t in x.unbind(1):
            h = self.cell(torch.cat([x_t, mem], 1), h)
            mem = (0.5 * mem + torch.tanh(self.write(h))).detach()
            ys.append(h + mem)
        return torch.stack(ys, 1)


@case(series())
class StackedParameter(nn.Module):
    """All weights in one parameter, sliced in each step; the start is learned and expanded."""

    def __init__(self):
        super().__init__()
        self.weights = nn.Parameter(torch.randn(3, UNITS, FEATURES + UNITS + 1) * 0.2)
        self.h0 = nn.Parameter(torch.zeros(UNITS))

    def forward(self, x):
        h = self.h0.expand(x.size(0), -1)
        for x_t in x.unbind(1):
            wz, wr, wn = self.weights.unbind(0)
            one = torch.ones_like(h[:, :1])
            z = torch.sigmoid(torch.cat([x_t, h, one], 1) @ wz.T)
            r = torch.sigmoid(torch.cat([x_t, h, one], 1) @ wr.T)
            n = torch.tanh(torch.cat([x_t, r * h, one], 1) @ wn.T)
            h = z * h + (1 - z) * n
        return h


@torch.no_grad()
def _orthogonal(*shape: int) -> Tensor:
    return nn.init.orthogonal_(torch.empty(*shape))


def gru_step(x: Tensor, h: Tensor, w_i: Tensor, w_h: Tensor, b: Tensor) -> Tensor:
    gi, gh = F.linear(x, w_i, b), F.linear(h, w_h)
    i_r, i_z, i_n = gi.chunk(3, -1)
    h_r, h_z, h_n = gh.chunk(3, -1)
    r, z = torch.sigmoid(i_r + h_r), torch.sigmoid(i_z + h_z)
    return torch.lerp(torch.tanh(i_n + r * h_n), h, z)


def run_gru(x: Tensor, h: Tensor, w_i: Tensor, w_h: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    ys: list[Tensor] = []
    for t in range(x.size(1)):
        h = gru_step(x[:, t], h, w_i, w_h, b)
        ys.append(h)
    return torch.stack(ys, 1), h


@case(series())
class FunctionalGRU(nn.Module):
    """The loop is in a function of the file, which takes the parameters."""

    def __init__(self):
        super().__init__()
        self.w_i = nn.Parameter(torch.randn(3 * UNITS, FEATURES) * 0.3)
        self.w_h = nn.Parameter(_orthogonal(3 * UNITS, UNITS))
        self.b = nn.Parameter(torch.zeros(3 * UNITS))

    def forward(self, x):
        return run_gru(x, x.new_zeros(x.size(0), UNITS), self.w_i, self.w_h, self.b)


def scan(f, init, xs):
    """The scan of another library, in Python."""
    carry, ys = init, []
    for x in xs:
        carry, y = f(carry, x)
        ys.append(y)
    return carry, torch.stack(ys)


@case(series())
class ClosureScan(nn.Module):
    """A function that closes over weights made before the loop, given to a scan of one's own."""

    def __init__(self):
        super().__init__()
        self.raw = nn.Parameter(torch.randn(UNITS, UNITS) * 0.3)
        self.inp = nn.Linear(FEATURES, UNITS)

    def forward(self, x):
        rotation = torch.matrix_exp(self.raw - self.raw.T)

        def body(carry, x_t):
            h, n = carry
            h = torch.tanh(h @ rotation + self.inp(x_t))
            return (h, n + 1), h * 2

        (h, n), ys = scan(body, (x.new_zeros(len(x), UNITS), x.new_zeros(())), x.transpose(0, 1))
        return ys.transpose(0, 1), h, n


def _images(batch, steps):
    return (normal(batch, 1, steps, steps),)


@case(_images)
class RowByRow(nn.Module):
    """An image read along its columns: time is the last axis."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Conv2d(1, FEATURES, 3, padding=1)
        self.cell = nn.LSTMCell(FEATURES, UNITS)

    def forward(self, image):
        feats = self.embed(image).mean(2)  # (batch, feature, column)
        state = None
        for column in range(feats.size(-1)):
            state = self.cell(feats[..., column], state)
        return state[0]


def _tokens_of_words(batch, steps):
    return (drawn_tokens(batch, steps, 3),)


@case(_tokens_of_words)
class CharsWithinWords(nn.Module):
    """A loop over characters within a loop over words: the inner state begins anew with each word."""

    def __init__(self):
        super().__init__()
        self.emb = nn.Embedding(VOCAB, FEATURES)
        self.char, self.word = nn.GRUCell(FEATURES, 8), nn.GRUCell(8, UNITS)

    def forward(self, words):
        h_word = self.emb.weight.new_zeros(words.size(0), UNITS)
        for w in range(words.size(1)):
            h_char = self.emb.weight.new_zeros(words.size(0), 8)
            for c in range(words.size(2)):
                h_char = self.char(self.emb(words[:, w, c]), h_char)
            h_word = self.word(h_char, h_word)
        return h_word
