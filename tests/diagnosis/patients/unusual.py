"""More healthy models, many of them unusual: cells of all kinds, memories, decoders, control, images.

Written tersely, each after something that people have published.
"""

# ruff: noqa: E741, F841, RUF059

from __future__ import annotations

import random
import warnings
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

import hiddenstate as hs
from tests.diagnosis.patients.healthy import Case

UNUSUAL: dict[str, Callable[[], Case]] = {}


def healthy(fn: Callable[[], Case]) -> Callable[[], Case]:
    UNUSUAL[fn.__name__.replace("_", " ")] = fn
    return fn


@healthy
def wordlm():
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.drop = nn.Dropout(0.5)
            self.enc = nn.Embedding(30, 12)
            self.rnn = nn.LSTM(12, 16, 2, dropout=0.5)
            self.dec = nn.Linear(16, 30)

        def forward(self, x, hidden):
            e = self.drop(self.enc(x))
            o, hidden = self.rnn(e, hidden)
            d = self.dec(self.drop(o))
            d = d.view(-1, 30)
            return F.log_softmax(d, dim=1), hidden

    m = M()
    return m, (torch.randint(30, (11, 6)), (torch.zeros(2, 6, 16), torch.zeros(2, 6, 16))), dict(batch_axis=1)


@healthy
def flat_fixed():
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.l = nn.GRU(3, 4, batch_first=True)
            self.f = nn.Linear(40, 2)

        def forward(self, x):
            o, _ = self.l(x)
            return self.f(o.contiguous().view(x.size(0), -1))

    return M(), (torch.randn(6, 10, 3),), {}


@healthy
def proj():
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.l = nn.LSTM(3, 8, 2, proj_size=4, batch_first=True)
            self.f = nn.Linear(4, 2)

        def forward(self, x):
            return self.f(self.l(x)[1][0][-1])

    return M(), (torch.randn(6, 10, 3),), {}


@healthy
def bn_reshape():
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.l = nn.GRU(3, 8, batch_first=True)
            self.bn = nn.BatchNorm1d(8)
            self.f = nn.Linear(8, 2)

        def forward(self, x):
            o, _ = self.l(x)
            b, t, c = o.shape
            return self.f(self.bn(o.reshape(b * t, c)).reshape(b, t, c))

    return M(), (torch.randn(6, 10, 3),), {}


@healthy
def vae_eval_samples():
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.e = nn.LSTM(3, 8, batch_first=True)
            self.mu = nn.Linear(8, 2)
            self.lv = nn.Linear(8, 2)
            self.d = nn.LSTM(2, 8, batch_first=True)
            self.o = nn.Linear(8, 3)

        def forward(self, x):
            _, (hh, _) = self.e(x)
            mu, lv = self.mu(hh[-1]), self.lv(hh[-1])
            z = mu + torch.randn_like(mu) * torch.exp(0.5 * lv)
            o, _ = self.d(z.unsqueeze(1).repeat(1, x.size(1), 1))
            return self.o(o), mu, lv

    return M(), (torch.randn(6, 10, 3),), {}


@healthy
def noise_train():
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.l = nn.GRU(3, 8, batch_first=True)
            self.f = nn.Linear(8, 1)

        def forward(self, x):
            if self.training:
                x = x + 0.1 * torch.randn_like(x)
            h0 = torch.zeros(1, x.size(0), 8)
            if self.training:
                h0 = h0 + 0.1 * torch.randn(1, x.size(0), 8)
            return self.f(self.l(x, h0)[0][:, -1]).squeeze(-1)

    return M(), (torch.randn(6, 10, 3),), {}


@healthy
def attn_cache():
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.l = nn.LSTM(3, 8, batch_first=True)
            self.a = nn.Linear(8, 1)
            self.f = nn.Linear(8, 2)
            self.last_attention = None

        def forward(self, x):
            o, _ = self.l(x)
            w = F.softmax(self.a(o).squeeze(-1), dim=1)
            self.last_attention = w
            return self.f(torch.bmm(w.unsqueeze(1), o).squeeze(1))

    return M(), (torch.randn(6, 10, 3),), {}


@healthy
def convlstm():
    class Cell(nn.Module):
        def __init__(self, i, hd):
            super().__init__()
            self.hd = hd
            self.conv = nn.Conv2d(i + hd, 4 * hd, 3, padding=1)

        def forward(self, x, state):
            hh, c = state
            i, f, o, g = torch.split(self.conv(torch.cat([x, hh], 1)), self.hd, 1)
            c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
            hh = torch.sigmoid(o) * torch.tanh(c)
            return hh, c

        def init_hidden(self, b, hw):
            return torch.zeros(b, self.hd, *hw), torch.zeros(b, self.hd, *hw)

    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.cell = Cell(1, 4)
            self.out = nn.Conv2d(4, 1, 1)

        def forward(self, x):
            b, t, c, hh, w = x.shape
            st = self.cell.init_hidden(b, (hh, w))
            outs = []
            for i in range(t):
                st = self.cell(x[:, i], st)
                outs.append(self.out(st[0]))
            return torch.stack(outs, 1)

    return M(), (torch.randn(4, 5, 1, 6, 6),), {}


@healthy
def bi_sum():
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.l = nn.LSTM(3, 8, batch_first=True, bidirectional=True)
            self.a = nn.Linear(8, 1, bias=False)
            self.f = nn.Linear(8, 2)

        def forward(self, x):
            o, _ = self.l(x)
            o = o[:, :, :8] + o[:, :, 8:]
            al = F.softmax(self.a(torch.tanh(o)), 1)
            return self.f(torch.tanh((o * al).sum(1)))

    return M(), (torch.randn(6, 10, 3),), {}


@healthy
def hn_mean():
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.l = nn.LSTM(3, 8, 3, batch_first=True, bidirectional=True)
            self.f = nn.Linear(8, 2)

        def forward(self, x):
            return self.f(self.l(x)[1][0].mean(0))

    return M(), (torch.randn(6, 10, 3),), {}


@healthy
def maxpool():
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.l = nn.GRU(3, 8, batch_first=True, bidirectional=True)
            self.f = nn.Linear(16, 2)

        def forward(self, x):
            return self.f(self.l(x)[0].max(1).values)

    return M(), (torch.randn(6, 10, 3),), {}


@healthy
def rcnn_text():
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.e = nn.Embedding(30, 6, padding_idx=0)
            self.l = nn.LSTM(6, 8, batch_first=True, bidirectional=True)
            self.w = nn.Linear(22, 10)
            self.f = nn.Linear(10, 2)

        def forward(self, x):
            e = self.e(x)
            o, _ = self.l(e)
            y = torch.tanh(self.w(torch.cat([o, e], 2))).permute(0, 2, 1)
            y = F.max_pool1d(y, y.shape[2]).squeeze(2)
            return self.f(y)

    return M(), (torch.randint(1, 30, (6, 10)),), {}


@healthy
def recurrent_hs():
    from tests.support.cells import LayerNormLSTMCell

    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.l = hs.Recurrent(LayerNormLSTMCell, 3, 8, num_layers=2)
            self.f = nn.Linear(8, 2)

        def forward(self, x):
            return self.f(self.l(x)[0])

    return M(), (torch.randn(6, 10, 3),), {}


@healthy
def carried():
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.l = nn.LSTM(3, 8, batch_first=True)
            self.f = nn.Linear(8, 2)

        def forward(self, x):
            return self.f(self.l(x)[0])

    m = M()
    m._c = ()
    c = hs.Carry(m)
    m(torch.randn(6, 10, 3))
    return m, (torch.randn(6, 10, 3),), {}


@healthy
def pointer():
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.e = nn.LSTM(2, 8, batch_first=True)
            self.c = nn.LSTMCell(2, 8)
            self.W1 = nn.Linear(8, 8)
            self.W2 = nn.Linear(8, 8)
            self.v = nn.Linear(8, 1)

        def forward(self, x):
            o, (hh, c) = self.e(x)
            hh, c = hh[0], c[0]
            inp = x.new_zeros(x.size(0), 2)
            outs = []
            for _ in range(x.size(1)):
                hh, c = self.c(inp, (hh, c))
                u = self.v(torch.tanh(self.W1(o) + self.W2(hh).unsqueeze(1))).squeeze(-1)
                a = F.log_softmax(u, 1)
                outs.append(a)
                inp = x[torch.arange(x.size(0)), a.argmax(1)]
            return torch.stack(outs, 1)

    return M(), (torch.rand(5, 7, 2),), {}


@healthy
def dataclass_out():
    @dataclass
    class Out:
        logits: torch.Tensor
        hidden: tuple

    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.l = nn.LSTM(3, 8, batch_first=True)
            self.f = nn.Linear(8, 2)

        def forward(self, x):
            o, hc = self.l(x)
            return Out(self.f(o), hc)

    return M(), (torch.randn(6, 10, 3),), {}


@healthy
def strided():
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.l = nn.LSTM(3, 8, batch_first=True)
            self.l2 = nn.LSTM(16, 8, batch_first=True)
            self.f = nn.Linear(8, 2)

        def forward(self, x):
            o, _ = self.l(x)
            b, t, hh = o.shape
            o = o.reshape(b, t // 2, 2 * hh)
            return self.f(self.l2(o)[0])

    return M(), (torch.randn(6, 10, 3),), {}


@healthy
def stateful_reset_batch():
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.l = nn.GRU(3, 8, batch_first=True)
            self.f = nn.Linear(8, 2)
            self.h = None

        def reset_state(self, batch):
            self.h = torch.zeros(1, batch, 8)

        def forward(self, x):
            if self.h is None or self.h.size(1) != x.size(0):
                self.reset_state(x.size(0))
            o, hh = self.l(x, self.h)
            self.h = hh.detach()
            return self.f(o)

    return M(), (torch.randn(6, 10, 3),), {}


@healthy
def emb_h0():
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.init = nn.Embedding(4, 8)
            self.l = nn.GRU(3, 8, batch_first=True)
            self.f = nn.Linear(8, 2)

        def forward(self, x, cls):
            return self.f(self.l(x, self.init(cls).unsqueeze(0))[0][:, -1])

    return M(), (torch.randn(6, 10, 3), torch.tensor([0, 1, 2, 3, 0, 1])), {}


def cellmodel(C):
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.cell = C
            self.f = nn.Linear(8, 2)

        def forward(self, x):
            hh = x.new_zeros(x.size(0), 8)
            for t in range(x.size(1)):
                hh = self.cell(x[:, t], hh)
            return self.f(hh)

    return M(), (torch.randn(6, 10, 3),), {}


class Base(nn.Module):
    def __init__(self):
        super().__init__()
        self.input_size, self.hidden_size = 3, 8
        self.a = nn.Linear(3, 8)
        self.b = nn.Linear(3, 8)
        self.c = nn.Linear(8, 8)
        self.d = nn.Linear(8, 8)


@healthy
def mingru():
    class C(Base):
        def __init__(self):
            super().__init__()
            del self.c, self.d

        def forward(self, x, h):
            z = torch.sigmoid(self.a(x))
            return (1 - z) * h + z * self.b(x)

    return cellmodel(C())


@healthy
def ligru():
    class C(Base):
        def __init__(self):
            super().__init__()
            self.bn = nn.BatchNorm1d(8)

        def forward(self, x, h):
            z = torch.sigmoid(self.a(x) + self.c(h))
            n = torch.relu(self.bn(self.b(x)) + self.d(h))
            return z * h + (1 - z) * n

    return cellmodel(C())


@healthy
def mgu():
    class C(Base):
        def forward(self, x, h):
            f = torch.sigmoid(self.a(x) + self.c(h))
            n = torch.tanh(self.b(x) + self.d(f * h))
            return (1 - f) * h + f * n

    return cellmodel(C())


@healthy
def indrnn():
    class C(nn.Module):
        def __init__(self):
            super().__init__()
            self.input_size, self.hidden_size = 3, 8
            self.a = nn.Linear(3, 8)
            self.u = nn.Parameter(torch.rand(8))

        def forward(self, x, h):
            return torch.relu(self.a(x) + self.u * h)

    return cellmodel(C())


@healthy
def leaky():
    class C(Base):
        def __init__(self):
            super().__init__()
            del self.b, self.d
            self.alpha = nn.Parameter(torch.tensor(0.0))

        def forward(self, x, h):
            al = torch.sigmoid(self.alpha)
            return (1 - al) * h + al * torch.tanh(self.a(x) + self.c(h))

    return cellmodel(C())


@healthy
def esn():
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.hidden_size = 16
            self.register_buffer("Win", torch.randn(3, 16) * 0.3)
            W = torch.randn(16, 16)
            self.register_buffer("W", 0.9 * W / torch.linalg.eigvals(W).abs().max())
            self.out = nn.Linear(16, 1)

        def forward(self, x):
            hh = x.new_zeros(x.size(0), 16)
            o = []
            for t in range(x.size(1)):
                hh = torch.tanh(x[:, t] @ self.Win + hh @ self.W)
                o.append(hh)
            return self.out(torch.stack(o, 1))

    return M(), (torch.randn(6, 10, 3),), {}


@healthy
def bf16():
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.l = nn.GRU(3, 8, batch_first=True)
            self.f = nn.Linear(8, 2)

        def forward(self, x):
            return self.f(self.l(x)[0])

    return M().bfloat16(), (torch.randn(6, 10, 3).bfloat16(),), {}


@healthy
def drqn():
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.e = nn.Linear(3, 8)
            self.l = nn.LSTM(8, 8, batch_first=True)
            self.v = nn.Linear(8, 1)
            self.a = nn.Linear(8, 4)

        def forward(self, x, hidden=None):
            o, hidden = self.l(F.relu(self.e(x)), hidden)
            v, a = self.v(o), self.a(o)
            return v + a - a.mean(-1, keepdim=True), hidden

    return M(), (torch.randn(6, 10, 3),), {}


@healthy
def a3c():
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.l = nn.LSTMCell(5, 8)
            self.c = nn.Linear(8, 1)
            self.a = nn.Linear(8, 4)

        def forward(self, inputs):
            x, (hx, cx) = inputs
            hx, cx = self.l(x, (hx, cx))
            return self.c(hx), self.a(hx), (hx, cx)

    return M(), ((torch.randn(6, 5), (torch.zeros(6, 8), torch.zeros(6, 8))),), {}


@healthy
def a3c_separate():
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.l = nn.LSTMCell(5, 8)
            self.c = nn.Linear(8, 1)
            self.a = nn.Linear(8, 4)

        def forward(self, x, hx, cx):
            hx, cx = self.l(x, (hx, cx))
            return self.c(hx), self.a(hx), hx, cx

    return M(), (torch.randn(6, 5), torch.zeros(6, 8), torch.zeros(6, 8)), {}


@healthy
def siamese_cat():
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.l = nn.LSTM(3, 8, batch_first=True)

        def forward(self, a, b):
            o = self.l(torch.cat([a, b], 0))[1][0][-1]
            u, v = o.chunk(2, 0)
            return F.cosine_similarity(u, v)

    return M(), (torch.randn(6, 10, 3), torch.randn(6, 10, 3)), {}


@healthy
def list_lengths():
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.l = nn.LSTM(3, 8, batch_first=True, bidirectional=True)
            self.f = nn.Linear(16, 2)

        def forward(self, x, lens):
            p = pack_padded_sequence(x, lens, batch_first=True, enforce_sorted=False)
            o, _ = pad_packed_sequence(self.l(p)[0], batch_first=True, total_length=x.size(1))
            return self.f(o)

    L = [10, 4, 7, 2, 9, 5]
    return M(), (torch.randn(6, 10, 3), L), dict(lengths=L)


@healthy
def covariates_future():
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.e = nn.LSTM(3, 8, batch_first=True)
            self.d = nn.LSTM(2, 8, batch_first=True)
            self.f = nn.Linear(8, 1)

        def forward(self, x, future):
            _, st = self.e(x)
            return self.f(self.d(future, st)[0]).squeeze(-1)

    return M(), (torch.randn(6, 10, 3), torch.randn(6, 4, 2)), {}


@healthy
def seq2seq_full():
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.es = nn.Embedding(30, 6)
            self.et = nn.Embedding(30, 6)
            self.enc = nn.GRU(6, 8, bidirectional=True)
            self.red = nn.Linear(16, 8)
            self.dec = nn.GRU(6 + 16, 8)
            self.att = nn.Linear(24, 8)
            self.v = nn.Linear(8, 1, bias=False)
            self.out = nn.Linear(30, 30)
            self.p = nn.Linear(8 + 16 + 6, 30)

        def forward(self, src, trg, teacher_forcing_ratio=0.5):
            T, B = trg.shape
            outs = torch.zeros(T, B, 30)
            eo, hh = self.enc(self.es(src))
            hh = torch.tanh(self.red(torch.cat((hh[-2], hh[-1]), 1)))
            inp = trg[0]
            for t in range(1, T):
                e = self.et(inp).unsqueeze(0)
                q = hh.unsqueeze(1).repeat(1, src.size(0), 1)
                en = torch.tanh(self.att(torch.cat((q, eo.permute(1, 0, 2)), 2)))
                a = F.softmax(self.v(en).squeeze(2), 1)
                w = torch.bmm(a.unsqueeze(1), eo.permute(1, 0, 2)).permute(1, 0, 2)
                o, hn = self.dec(torch.cat((e, w), 2), hh.unsqueeze(0))
                hh = hn.squeeze(0)
                pr = self.out(self.p(torch.cat((o.squeeze(0), w.squeeze(0), e.squeeze(0)), 1)))
                outs[t] = pr
                tf = random.random() < teacher_forcing_ratio
                inp = trg[t] if tf else pr.argmax(1)
            return outs

    return M(), (torch.randint(1, 30, (9, 5)), torch.randint(1, 30, (7, 5)), 0), dict(batch_axis=1)


@healthy
def spectral():
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.l = nn.LSTM(3, 8, batch_first=True)
            self.f = nn.utils.parametrizations.spectral_norm(nn.Linear(8, 2))

        def forward(self, x):
            return self.f(self.l(x)[0])

    return M(), (torch.randn(6, 10, 3),), {}


@healthy
def scripted():
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.l = nn.LSTM(3, 8, batch_first=True)
            self.f = nn.Linear(8, 2)

        def forward(self, x):
            o, _ = self.l(x)
            return self.f(o)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.jit.script(M()), (torch.randn(6, 10, 3),), {}


@healthy
def long_fresh():
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.l = nn.LSTM(3, 8, batch_first=True)
            self.f = nn.Linear(8, 2)

        def forward(self, x):
            return self.f(self.l(x)[0][:, -1])

    return M(), (torch.randn(6, 60, 3),), {}


@healthy
def sequential():
    class Last(nn.Module):
        def forward(self, t):
            return t[0][:, -1]

    return nn.Sequential(nn.LSTM(3, 8, batch_first=True), Last(), nn.Linear(8, 2)), (torch.randn(6, 10, 3),), {}


@healthy
def zeros_input():
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.l = nn.LSTM(3, 8, batch_first=True)
            self.f = nn.Linear(8, 2)

        def forward(self, x):
            return self.f(self.l(x)[0][:, -1])

    return M(), (torch.zeros(6, 10, 3),), {}


@healthy
def onehot():
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.l = nn.LSTM(12, 8, batch_first=True)
            self.f = nn.Linear(8, 12)

        def forward(self, x):
            return self.f(self.l(F.one_hot(x, 12).float())[0])

    return M(), (torch.randint(12, (6, 10)),), {}


@healthy
def loss_inside():
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.e = nn.Embedding(30, 6)
            self.l = nn.LSTM(6, 8, batch_first=True)
            self.f = nn.Linear(8, 30)

        def forward(self, x, y):
            lg = self.f(self.l(self.e(x))[0])
            return {"loss": F.cross_entropy(lg.transpose(1, 2), y), "logits": lg}

    return M(), (torch.randint(30, (6, 10)), torch.randint(30, (6, 10))), {}


@healthy
def charrnn_step():
    class RNN(nn.Module):
        def __init__(self):
            super().__init__()
            self.hidden_size = 16
            self.i2h = nn.Linear(10 + 16, 16)
            self.i2o = nn.Linear(10 + 16, 5)
            self.softmax = nn.LogSoftmax(dim=1)

        def forward(self, input, hidden):
            c = torch.cat((input, hidden), 1)
            hidden = self.i2h(c)
            return self.softmax(self.i2o(c)), hidden

        def initHidden(self):
            return torch.zeros(1, 16)

    m = RNN()
    return m, (torch.randn(1, 10), m.initHidden()), {}


@healthy
def charrnn_new():
    class CharRNN(nn.Module):
        def __init__(self):
            super().__init__()
            self.rnn = nn.RNN(10, 16)
            self.h2o = nn.Linear(16, 5)
            self.softmax = nn.LogSoftmax(dim=1)

        def forward(self, line):
            o, hh = self.rnn(line)
            return self.softmax(self.h2o(hh[0]))

    return CharRNN(), (torch.randn(7, 1, 10),), dict(batch_axis=1)


@healthy
def global_context_tagger():
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.l = nn.LSTM(3, 8, batch_first=True, bidirectional=True)
            self.f = nn.Linear(32, 2)

        def forward(self, x):
            o, (hh, _) = self.l(x)
            g = torch.cat([hh[-2], hh[-1]], 1).unsqueeze(1).expand(-1, x.size(1), -1)
            return self.f(torch.cat([o, g], -1))

    return M(), (torch.randn(6, 10, 3),), {}


@healthy
def self_gating_custom_lstm_layer():
    class LSTM(nn.Module):
        def __init__(self, i, hd):
            super().__init__()
            self.hd = hd
            self.W = nn.Parameter(torch.randn(i, 4 * hd) * 0.2)
            self.U = nn.Parameter(torch.randn(hd, 4 * hd) * 0.2)
            self.b = nn.Parameter(torch.zeros(4 * hd))

        def forward(self, x, init_states=None):
            b, t, _ = x.size()
            seq = []
            if init_states is None:
                hh, c = torch.zeros(b, self.hd), torch.zeros(b, self.hd)
            else:
                hh, c = init_states
            for k in range(t):
                g = x[:, k] @ self.W + hh @ self.U + self.b
                i, f, gg, o = (
                    torch.sigmoid(g[:, : self.hd]),
                    torch.sigmoid(g[:, self.hd : 2 * self.hd]),
                    torch.tanh(g[:, 2 * self.hd : 3 * self.hd]),
                    torch.sigmoid(g[:, 3 * self.hd :]),
                )
                c = f * c + i * gg
                hh = o * torch.tanh(c)
                seq.append(hh.unsqueeze(0))
            seq = torch.cat(seq, 0).transpose(0, 1).contiguous()
            return seq, (hh, c)

    return LSTM(3, 8), (torch.randn(6, 10, 3),), {}


@healthy
def masked_hidden_update():
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.c = nn.GRUCell(3, 8)
            self.f = nn.Linear(8, 2)

        def forward(self, x, mask):
            hh = x.new_zeros(x.size(0), 8)
            for t in range(x.size(1)):
                n = self.c(x[:, t], hh)
                m = mask[:, t : t + 1].float()
                hh = m * n + (1 - m) * hh
            return self.f(hh)

    L = torch.tensor([10, 4, 7, 2, 9, 5])
    mk = torch.arange(10) < L[:, None]
    return M(), (torch.randn(6, 10, 3), mk), dict(lengths=L)


@healthy
def multi_task_stats():
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.l = nn.GRU(3, 8, batch_first=True)
            self.f = nn.Linear(8, 2)
            self.calls = 0
            self.log = []

        def forward(self, x):
            self.calls += 1
            self.log.append(float(x.mean()))
            return self.f(self.l(x)[0][:, -1])

    return M(), (torch.randn(6, 10, 3),), {}


@healthy
def big_batch():
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.l = nn.GRU(3, 8, batch_first=True)
            self.f = nn.Linear(8, 2)

        def forward(self, x):
            return self.f(self.l(x)[0][:, -1])

    return M(), (torch.randn(100, 12, 3),), dict(targets=torch.randint(2, (100,)), loss=F.cross_entropy)


@healthy
def zoneout_train():
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.c = nn.LSTMCell(3, 8)
            self.f = nn.Linear(8, 2)

        def forward(self, x):
            hh = c = x.new_zeros(x.size(0), 8)
            for t in range(x.size(1)):
                h2, c2 = self.c(x[:, t], (hh, c))
                if self.training:
                    m = (torch.rand_like(hh) < 0.1).float()
                    hh = m * hh + (1 - m) * h2
                    c = c2
                else:
                    hh = 0.1 * hh + 0.9 * h2
                    c = c2
            return self.f(hh)

    return M(), (torch.randn(6, 10, 3),), {}


@healthy
def video():
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.cnn = nn.Sequential(nn.Conv2d(3, 4, 3, 2), nn.ReLU(), nn.AdaptiveAvgPool2d(1))
            self.l = nn.LSTM(4, 8, batch_first=True)
            self.f = nn.Linear(8, 3)

        def forward(self, x):
            b, t = x.shape[:2]
            f = self.cnn(x.flatten(0, 1)).view(b, t, -1)
            return self.f(self.l(f)[0][:, -1])

    return M(), (torch.randn(4, 6, 3, 8, 8),), {}


@healthy
def channel_first():
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.cv = nn.Conv1d(3, 6, 5, stride=2, padding=2)
            self.l = nn.GRU(6, 8, batch_first=True)
            self.f = nn.Linear(8, 3)

        def forward(self, x):
            return self.f(self.l(F.relu(self.cv(x)).permute(0, 2, 1))[1][-1])

    return M(), (torch.randn(4, 3, 20),), {}


@healthy
def weight_drop():
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.l = (
                hs.regularize.WeightDrop(nn.LSTM(3, 8, batch_first=True), 0.3)
                if hasattr(hs, "regularize")
                else nn.LSTM(3, 8, batch_first=True)
            )
            self.f = nn.Linear(8, 3)

        def forward(self, x):
            return self.f(self.l(x)[0])

    return M(), (torch.randn(4, 10, 3),), {}


class C2(nn.Module):
    def __init__(self):
        super().__init__()
        self.input_size, self.hidden_size = 3, 8
        self.g = nn.Linear(11, 32)


@healthy
def cifg():
    class C(nn.Module):
        def __init__(self):
            super().__init__()
            self.input_size, self.hidden_size = 3, 8
            self.g = nn.Linear(11, 24)

        def forward(self, x, st):
            hh, c = st
            f, g, o = self.g(torch.cat([x, hh], 1)).chunk(3, 1)
            f = torch.sigmoid(f)
            c = f * c + (1 - f) * torch.tanh(g)
            hh = torch.sigmoid(o) * torch.tanh(c)
            return hh, c

    return C(), (), {}


@healthy
def peephole():
    class C(C2):
        def __init__(self):
            super().__init__()
            self.p = nn.Parameter(torch.randn(3, 8) * 0.1)

        def forward(self, x, st):
            hh, c = st
            i, f, g, o = self.g(torch.cat([x, hh], 1)).chunk(4, 1)
            i = torch.sigmoid(i + self.p[0] * c)
            f = torch.sigmoid(f + self.p[1] * c)
            c = f * c + i * torch.tanh(g)
            o = torch.sigmoid(o + self.p[2] * c)
            hh = o * torch.tanh(c)
            return hh, (hh, c)

    return C(), (), {}


@healthy
def mlstm():
    class C(nn.Module):
        def __init__(self):
            super().__init__()
            self.input_size, self.hidden_size = 3, 8
            self.mx = nn.Linear(3, 8)
            self.mh = nn.Linear(8, 8)
            self.g = nn.Linear(11, 32)

        def forward(self, x, st):
            hh, c = st
            m = self.mx(x) * self.mh(hh)
            i, f, g, o = self.g(torch.cat([x, m], 1)).chunk(4, 1)
            c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
            return torch.sigmoid(o) * torch.tanh(c), c

    return C(), (), {}


@healthy
def fastgrnn():
    class C(nn.Module):
        def __init__(self):
            super().__init__()
            self.input_size, self.hidden_size = 3, 8
            self.W = nn.Linear(3, 8, bias=False)
            self.U = nn.Linear(8, 8, bias=False)
            self.bz = nn.Parameter(torch.ones(8))
            self.bh = nn.Parameter(torch.ones(8))
            self.z = nn.Parameter(torch.tensor(1.0))
            self.n = nn.Parameter(torch.tensor(-4.0))

        def forward(self, x, h):
            p = self.W(x) + self.U(h)
            z = torch.sigmoid(p + self.bz)
            c = torch.tanh(p + self.bh)
            return z * h + (torch.sigmoid(self.z) * (1 - z) + torch.sigmoid(self.n)) * c

    return C(), (), {}


@healthy
def sru():
    class C(nn.Module):
        def __init__(self):
            super().__init__()
            self.input_size, self.hidden_size = 8, 8
            self.W = nn.Linear(8, 24)

        def forward(self, x, c):
            xt, f, r = self.W(x).chunk(3, -1)
            f, r = torch.sigmoid(f), torch.sigmoid(r)
            c = f * c + (1 - f) * xt
            return r * torch.tanh(c) + (1 - r) * x, c

    return C(), (), {}


@healthy
def custom_gru_rz_coupled():
    class C(nn.Module):
        def __init__(self):
            super().__init__()
            self.input_size, self.hidden_size = 3, 8
            self.x = nn.Linear(3, 24)
            self.h = nn.Linear(8, 24)

        def forward(self, x, h):
            xr, xz, xn = self.x(x).chunk(3, 1)
            hr, hz, hn = self.h(h).chunk(3, 1)
            r = torch.sigmoid(xr + hr)
            z = torch.sigmoid(xz + hz)
            n = torch.tanh(xn + r * hn)
            return n + z * (h - n)

    return C(), (), {}


@healthy
def one_step():
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.l = nn.LSTM(3, 8, batch_first=True)
            self.f = nn.Linear(8, 2)

        def forward(self, x):
            return self.f(self.l(x)[0][:, -1])

    return M(), (torch.randn(6, 1, 3),), {}


@healthy
def two_steps():
    return one_step()[0], (torch.randn(6, 2, 3),), {}


@healthy
def decoder_step():
    class D(nn.Module):
        def __init__(self):
            super().__init__()
            self.hidden_size = 8
            self.e = nn.Embedding(30, 8)
            self.g = nn.GRU(8, 8)
            self.o = nn.Linear(8, 30)

        def forward(self, input, hidden):
            out = F.relu(self.e(input).view(1, -1, 8))
            out, hidden = self.g(out, hidden)
            return F.log_softmax(self.o(out[0]), 1), hidden

    return D(), (torch.randint(30, (5,)), torch.zeros(1, 5, 8)), {}


@healthy
def encoder_tutorial():
    class E(nn.Module):
        def __init__(self):
            super().__init__()
            self.hidden_size = 8
            self.embedding = nn.Embedding(30, 8)
            self.gru = nn.GRU(8, 8, batch_first=True)
            self.dropout = nn.Dropout(0.1)

        def forward(self, input):
            o, hh = self.gru(self.dropout(self.embedding(input)))
            return o, hh

    return E(), (torch.randint(30, (5, 9)),), {}


@healthy
def decoder_tutorial():
    class D(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding = nn.Embedding(30, 8)
            self.gru = nn.GRU(8, 8, batch_first=True)
            self.out = nn.Linear(8, 30)

        def forward(self, encoder_outputs, encoder_hidden, target_tensor=None):
            b = encoder_outputs.size(0)
            di = torch.zeros(b, 1, dtype=torch.long)
            dh = encoder_hidden
            outs = []
            for i in range(10):
                e = F.relu(self.embedding(di))
                o, dh = self.gru(e, dh)
                o = self.out(o)
                outs.append(o)
                if target_tensor is not None:
                    di = target_tensor[:, i].unsqueeze(1)
                else:
                    di = o.topk(1)[1].squeeze(-1).detach()
            return F.log_softmax(torch.cat(outs, 1), -1), dh, None

    return D(), (torch.randn(5, 9, 8), torch.randn(1, 5, 8), torch.randint(30, (5, 10))), {}


@healthy
def crf_like_mask():
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.e = nn.Embedding(30, 8, padding_idx=0)
            self.l = nn.LSTM(8, 8, batch_first=True, bidirectional=True)
            self.f = nn.Linear(16, 5)

        def forward(self, x):
            mask = x != 0
            L = mask.sum(1).cpu()
            p = pack_padded_sequence(self.e(x), L, batch_first=True, enforce_sorted=False)
            o, _ = pad_packed_sequence(self.l(p)[0], batch_first=True, total_length=x.size(1))
            return self.f(o).masked_fill(~mask.unsqueeze(-1), -1e4)

    L = torch.tensor([10, 4, 7, 2, 9, 5])
    x = torch.randint(1, 30, (6, 10))
    x[torch.arange(10) >= L[:, None]] = 0
    return M(), (x,), dict(lengths=L)


@healthy
def inf_masked_logits():
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.l = nn.LSTM(3, 8, batch_first=True)
            self.f = nn.Linear(8, 5)

        def forward(self, x, legal):
            return self.f(self.l(x)[0]).masked_fill(~legal, float("-inf"))

    lg = torch.rand(6, 10, 5) > 0.3
    lg[..., 0] = True
    return M(), (torch.randn(6, 10, 3), lg), {}


@healthy
def tbptt_inside():
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.l = nn.LSTM(3, 8, batch_first=True)
            self.f = nn.Linear(8, 5)

        def forward(self, x):
            st = None
            outs = []
            for ch in x.split(4, 1):
                if st is not None:
                    st = tuple(v.detach() for v in st)
                o, st = self.l(ch, st)
                outs.append(o)
            return self.f(torch.cat(outs, 1))

    return M(), (torch.randn(6, 12, 3),), {}


@healthy
def tbptt_inside_whose_last_piece_is_one_step():
    model, _, options = tbptt_inside()
    return model, (torch.randn(6, 13, 3),), options


@healthy
def multi_resolution():
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = nn.GRU(3, 8, batch_first=True)
            self.b = nn.GRU(3, 8, batch_first=True)
            self.f = nn.Linear(16, 2)

        def forward(self, x):
            return self.f(torch.cat([self.a(x)[1][-1], self.b(x[:, ::3])[1][-1]], 1))

    return M(), (torch.randn(6, 12, 3),), {}


@healthy
def bptt_fixed_reservoir_readout():
    m = nn.LSTM(3, 8, batch_first=True).requires_grad_(False)

    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.l = m
            self.f = nn.Linear(8, 2)

        def forward(self, x):
            return self.f(self.l(x)[0])

    return M(), (torch.randn(6, 12, 3),), {}


@healthy
def ensembles():
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.ms = nn.ModuleList(nn.LSTM(3, 8, batch_first=True) for _ in range(3))
            self.f = nn.Linear(8, 2)

        def forward(self, x):
            return torch.stack([self.f(l(x)[0][:, -1]) for l in self.ms]).mean(0)

    return M(), (torch.randn(6, 12, 3),), {}


@healthy
def actor_critic_tuple():
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.g = nn.GRU(3, 8)
            self.pi = nn.Linear(8, 4)
            self.v = nn.Linear(8, 1)

        def forward(self, x, h, masks):
            outs = []
            for t in range(x.size(0)):
                o, h = self.g(x[t : t + 1], h * masks[t].view(1, -1, 1))
                outs.append(o)
            o = torch.cat(outs)
            return F.softmax(self.pi(o), -1), self.v(o).squeeze(-1), h

    return M(), (torch.randn(10, 6, 3), torch.zeros(1, 6, 8), (torch.rand(10, 6) > 0.2).float()), dict(batch_axis=1)


@healthy
def generator_from_noise_input():
    class G(nn.Module):
        def __init__(self):
            super().__init__()
            self.l = nn.LSTM(4, 8, batch_first=True)
            self.f = nn.Linear(8, 1)

        def forward(self, z):
            return torch.tanh(self.f(self.l(z)[0]))

    return G(), (torch.randn(6, 12, 4),), {}


@healthy
def trained_saturating():
    m, x, k = one_step()[0], (torch.randn(6, 20, 3),), {}
    with torch.no_grad():
        for p in m.l.parameters():
            p.mul_(4)
    return m, x, k


@healthy
def time2vec_float_2d():
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.l = nn.LSTM(4, 8, batch_first=True)
            self.f = nn.Linear(8, 1)

        def forward(self, x, times):
            return self.f(self.l(torch.cat([x, times.unsqueeze(-1)], -1))[0])

    return M(), (torch.randn(6, 12, 3), torch.rand(6, 12).cumsum(1)), {}


@healthy
def revin():
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.l = nn.LSTM(3, 8, batch_first=True)
            self.f = nn.Linear(8, 3)

        def forward(self, x):
            mu, sd = x.mean(1, keepdim=True), x.std(1, keepdim=True) + 1e-5
            return self.f(self.l((x - mu) / sd)[0][:, -1]) * sd[:, 0] + mu[:, 0]

    return M(), (torch.randn(6, 12, 3),), {}


@healthy
def stacked_h_list_out():
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.c = nn.LSTMCell(3, 8)

        def forward(self, x):
            h = c = torch.zeros(len(x), 8)
            hs_ = []
            for t in range(x.size(1)):
                h, c = self.c(x[:, t], (h, c))
                hs_.append(h)
            return hs_

    return M(), (torch.randn(6, 12, 3),), {}


@healthy
def packed_dict():
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.l = nn.LSTM(3, 8, batch_first=True, bidirectional=True)
            self.f = nn.Linear(16, 2)

        def forward(self, batch):
            p = pack_padded_sequence(batch["x"], batch["len"].cpu(), batch_first=True, enforce_sorted=False)
            _, (hn, _) = self.l(p)
            return {"y": self.f(torch.cat([hn[0], hn[1]], -1))}

    L = torch.tensor([10, 4, 7, 2, 9, 5])
    return M(), ({"x": torch.randn(6, 10, 3), "len": L},), dict(lengths=L)


@healthy
def udacity_sentiment():
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.e = nn.Embedding(30, 6)
            self.lstm = nn.LSTM(6, 8, 2, dropout=0.5, batch_first=True)
            self.d = nn.Dropout(0.3)
            self.fc = nn.Linear(8, 1)
            self.sig = nn.Sigmoid()

        def forward(self, x, hidden):
            b = x.size(0)
            o, hidden = self.lstm(self.e(x.long()), hidden)
            o = o.contiguous().view(-1, 8)
            o = self.sig(self.fc(self.d(o)))
            o = o.view(b, -1)[:, -1]
            return o, hidden

    return M(), (torch.randint(30, (6, 10)), (torch.zeros(2, 6, 8), torch.zeros(2, 6, 8))), {}


@healthy
def udacity_char():
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.lstm = nn.LSTM(20, 8, 2, dropout=0.5, batch_first=True)
            self.d = nn.Dropout(0.3)
            self.fc = nn.Linear(8, 20)

        def forward(self, x, hidden):
            o, hidden = self.lstm(x, hidden)
            o = self.d(o).contiguous().view(-1, 8)
            return self.fc(o), hidden

    return M(), (F.one_hot(torch.randint(20, (6, 10)), 20).float(), (torch.zeros(2, 6, 8), torch.zeros(2, 6, 8))), {}


@healthy
def init_each_forward():
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.l = nn.LSTM(3, 8, batch_first=True)
            self.f = nn.Linear(8, 2)

        def init_hidden(self, b):
            return torch.zeros(1, b, 8), torch.zeros(1, b, 8)

        def forward(self, x):
            self.hidden = self.init_hidden(x.size(0))
            o, self.hidden = self.l(x, self.hidden)
            return self.f(o[:, -1])

    return M(), (torch.randn(6, 10, 3),), {}


@healthy
def aladdin():
    class RNN(nn.Module):
        def __init__(self):
            super().__init__()
            self.hidden_size = 8
            self.num_layers = 2
            self.rnn = nn.GRU(28, 8, 2, batch_first=True)
            self.fc = nn.Linear(8 * 28, 10)

        def forward(self, x):
            h0 = torch.zeros(self.num_layers, x.size(0), self.hidden_size).to(x.device)
            o, _ = self.rnn(x, h0)
            return self.fc(o.reshape(o.shape[0], -1))

    return RNN(), (torch.rand(8, 28, 28),), {}


@healthy
def mnist4d():
    class RNN(nn.Module):
        def __init__(self):
            super().__init__()
            self.rnn = nn.LSTM(28, 8, 1, batch_first=True)
            self.fc = nn.Linear(8, 10)

        def forward(self, x):
            return self.fc(self.rnn(x.squeeze(1))[0][:, -1])

    return RNN(), (torch.rand(8, 1, 28, 28),), {}


@healthy
def checkpointed():
    from torch.utils.checkpoint import checkpoint

    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.l = nn.LSTM(3, 8, batch_first=True)
            self.f = nn.Linear(8, 2)

        def forward(self, x):
            return self.f(checkpoint(lambda v: self.l(v)[0], x, use_reentrant=False))

    return M(), (torch.randn(6, 10, 3),), {}


@healthy
def dp():
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.l = nn.LSTM(3, 8, batch_first=True)
            self.f = nn.Linear(8, 2)

        def forward(self, x):
            return self.f(self.l(x)[0])

    return nn.DataParallel(M()), (torch.randn(6, 10, 3),), {}


@healthy
def chatbot_encoder():
    class E(nn.Module):
        def __init__(self):
            super().__init__()
            self.n_layers = 2
            self.hidden_size = 8
            self.embedding = nn.Embedding(30, 8)
            self.gru = nn.GRU(8, 8, 2, dropout=0.1, bidirectional=True)

        def forward(self, input_seq, input_lengths, hidden=None):
            e = self.embedding(input_seq)
            p = pack_padded_sequence(e, input_lengths)
            o, hidden = self.gru(p, hidden)
            o, _ = pad_packed_sequence(o)
            return o[:, :, :8] + o[:, :, 8:], hidden

    L = torch.tensor([10, 9, 7, 5, 4, 2])
    return E(), (torch.randint(1, 30, (10, 6)), L), dict(batch_axis=1, lengths=L)


@healthy
def multi_input_states_dict():
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = nn.GRUCell(3, 8)
            self.b = nn.GRUCell(8, 8)
            self.f = nn.Linear(8, 2)

        def forward(self, x, states=None):
            if states is None:
                states = {"a": x.new_zeros(x.size(0), 8), "b": x.new_zeros(x.size(0), 8)}
            st = dict(states)
            o = []
            for t in range(x.size(1)):
                st["a"] = self.a(x[:, t], st["a"])
                st["b"] = self.b(st["a"], st["b"])
                o.append(st["b"])
            return self.f(torch.stack(o, 1)), st

    return M(), (torch.randn(6, 10, 3),), {}


@healthy
def bert_like_crf_potentials():
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.e = nn.Embedding(30, 8)
            self.l = nn.LSTM(8, 4, bidirectional=True)
            self.f = nn.Linear(8, 5)
            self.trans = nn.Parameter(torch.randn(5, 5))

        def forward(self, x):
            f = self.f(self.l(self.e(x).transpose(0, 1))[0]).transpose(0, 1)
            sc = f[:, 0]
            for t in range(1, f.size(1)):
                sc = torch.logsumexp(sc.unsqueeze(2) + self.trans, 1) + f[:, t]
            return torch.logsumexp(sc, 1), f

    return M(), (torch.randint(30, (6, 10)),), {}


@healthy
def ntm_like_memory():
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.c = nn.LSTMCell(3 + 4, 8)
            self.k = nn.Linear(8, 4)
            self.v = nn.Linear(8, 4)
            self.register_buffer("mem", torch.randn(5, 4))
            self.f = nn.Linear(12, 2)

        def forward(self, x):
            b = x.size(0)
            M_ = self.mem.expand(b, 5, 4)
            r = x.new_zeros(b, 4)
            h = c = x.new_zeros(b, 8)
            o = []
            for t in range(x.size(1)):
                h, c = self.c(torch.cat([x[:, t], r], 1), (h, c))
                w = torch.softmax((M_ * self.k(h).unsqueeze(1)).sum(-1), 1)
                M_ = M_ + w.unsqueeze(2) * self.v(h).unsqueeze(1)
                r = (w.unsqueeze(2) * M_).sum(1)
                o.append(self.f(torch.cat([h, r], 1)))
            return torch.stack(o, 1)

    return M(), (torch.randn(6, 10, 3),), {}


@healthy
def rl_value_scalar_time_first_mask():
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.g = nn.GRU(3, 8)
            self.v = nn.Linear(8, 1)

        def forward(self, obs, hxs):
            o, hxs = self.g(obs, hxs)
            return self.v(o).squeeze(-1), hxs

    return M(), (torch.randn(10, 6, 3), torch.zeros(1, 6, 8)), dict(batch_axis=1)


@healthy
def scheduled_sampling_decoder_cell_zero_init_outputs():
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.e = nn.GRU(1, 8, batch_first=True)
            self.d = nn.GRUCell(1, 8)
            self.f = nn.Linear(8, 1)

        def forward(self, x, y):
            _, h = self.e(x)
            h = h[-1]
            inp = x[:, -1]
            out = []
            for t in range(y.size(1)):
                h = self.d(inp, h)
                p = self.f(h)
                out.append(p)
                inp = y[:, t] if self.training and random.random() < 0.5 else p
            return torch.cat(out, 1)

    return M(), (torch.randn(6, 10, 1), torch.randn(6, 5, 1)), {}


@healthy
def complex_numbers():
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.g = nn.GRU(6, 8, batch_first=True)
            self.f = nn.Linear(8, 5)

        def forward(self, x):
            return self.f(self.g(torch.view_as_real(x).flatten(2))[0])

    return M(), (torch.randn(6, 10, 3, dtype=torch.complex64),), {}


@healthy
def tokens_out():
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.g = nn.GRU(3, 8, batch_first=True)
            self.f = nn.Linear(8, 5)

        def forward(self, x):
            return self.f(self.g(x)[0]).argmax(-1)

    return M(), (torch.randn(6, 10, 3),), {}


@healthy
def nothing_but_a_loss():
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.g = nn.GRU(3, 8, batch_first=True)
            self.f = nn.Linear(8, 5)

        def forward(self, x, y):
            return F.cross_entropy(self.f(self.g(x)[0]).transpose(1, 2), y)

    return M(), (torch.randn(6, 10, 3), torch.randint(5, (6, 10))), {}


@healthy
def trained_until_it_knows_by_heart():
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.e = nn.Embedding(12, 8)
            self.l = nn.LSTM(8, 32, batch_first=True)
            self.f = nn.Linear(32, 12)

        def forward(self, x):
            return self.f(self.l(self.e(x))[0])

    def loss(out, y):
        return F.cross_entropy(out.transpose(1, 2), y)

    model, x = M(), torch.randint(12, (8, 15))
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    for _ in range(150):
        optimizer.zero_grad()
        loss(model(x[:, :-1]), x[:, 1:]).backward()
        optimizer.step()
    return model, (x[:, :-1],), {"optimizer": optimizer, "targets": x[:, 1:], "loss": loss}
