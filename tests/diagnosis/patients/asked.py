"""More mistakes, as people have published them and asked about them; written tersely.

`ASKED` maps a name to the codes of which at least one has to be found, and a function as in `sick`.
"""

# ruff: noqa: E741, F841, RUF059, B006

from __future__ import annotations

import warnings
from collections.abc import Callable

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from tests.diagnosis.patients.healthy import Case

ASKED: dict[str, tuple[tuple[str, ...], Callable[[], Case]]] = {}


def asked(*codes: str) -> Callable[[Callable[[], Case]], Callable[[], Case]]:
    def note(fn: Callable[[], Case]) -> Callable[[], Case]:
        ASKED[fn.__name__.replace("_", " ")] = (codes, fn)
        return fn

    return note


class L(nn.Module):
    def __init__(self, out=2, **k):
        super().__init__()
        k = {"batch_first": True, **k}
        self.lstm = nn.LSTM(3, 8, **k)
        self.fc = nn.Linear(8 * (1 + bool(k.get("bidirectional"))), out)


@asked("HS101", "HS109")
def pad_packed_no_batch_first():
    class M(L):
        def forward(self, x, l):
            p = pack_padded_sequence(x, l, batch_first=True, enforce_sorted=False)
            o, _ = pad_packed_sequence(self.lstm(p)[0])
            return self.fc(o[:, -1])

    l = torch.tensor([10, 4, 7, 2, 9, 5])
    return M(), (torch.randn(6, 10, 3), l), dict(lengths=l)


@asked("HS101")
def loop_rows_carry():
    class M(L):
        def forward(self, x):
            hc = None
            outs = []
            for i in range(x.size(0)):
                o, hc = self.lstm(x[i : i + 1], hc)
                outs.append(self.fc(o[:, -1]))
            return torch.cat(outs)

    return M(), (torch.randn(6, 10, 3),), {}


@asked("HS201", "HS203")
def outputs_list_grows():
    class M(L):
        def __init__(self):
            super().__init__()
            self.outputs = []

        def forward(self, x):
            o, _ = self.lstm(x)
            self.outputs.append(o[:, -1])
            return self.fc(torch.stack(self.outputs).mean(0))

    return M(), (torch.randn(6, 10, 3),), {}


@asked("HS201", "HS203")
def mutable_default():
    class M(L):
        def forward(self, x, hist=[]):
            o, _ = self.lstm(x)
            hist.append(o[:, -1].detach())
            return self.fc(sum(hist))

    return M(), (torch.randn(6, 10, 3),), {}


@asked("HS102")
def layernorm_time():
    class M(L):
        def __init__(self):
            super().__init__()
            self.ln = nn.LayerNorm([10, 8])

        def forward(self, x):
            return self.fc(self.ln(self.lstm(x)[0]))

    return M(), (torch.randn(6, 10, 3),), {}


@asked("HS102")
def batch_mean_time():
    class M(L):
        def forward(self, x):
            o, _ = self.lstm(x)
            return self.fc(o - o.mean(1, keepdim=True))

    return M(), (torch.randn(6, 10, 3),), {}


@asked("HS102")
def lm_unmasked_attention():
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.e = nn.Embedding(30, 8)
            self.l = nn.LSTM(8, 8, batch_first=True)
            self.f = nn.Linear(16, 30)

        def forward(self, x):
            o, _ = self.l(self.e(x))
            a = F.softmax(o @ o.transpose(1, 2), -1)
            return self.f(torch.cat([o, a @ o], -1))

    return M(), (torch.randint(30, (6, 10)),), {}


@asked("HS102")
def flip_input():
    class M(L):
        def forward(self, x):
            return self.fc(self.lstm(x.flip(1))[0])

    return M(), (torch.randn(6, 10, 3),), {}


@asked("HS109", "HS107")
def bi_h0():
    class M(L):
        def __init__(self):
            super().__init__(bidirectional=True)
            self.fc = nn.Linear(8, 2)

        def forward(self, x):
            return self.fc(self.lstm(x)[1][0][0])

    return M(), (torch.randn(6, 10, 3),), {}


@asked("HS107")
def bi_last_mid():
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.e = nn.Embedding(30, 6)
            self.g = nn.GRU(6, 8, 2, bidirectional=True, batch_first=True, dropout=0.1)
            self.d = nn.Dropout(0.3)
            self.f = nn.Sequential(nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 2))

        def forward(self, x):
            o, _ = self.g(self.e(x))
            return torch.sigmoid(self.f(self.d(o[:, -1, :])))

    return M(), (torch.randint(30, (6, 10)),), {}


@asked("HS107")
def bi_last_bn():
    class M(L):
        def __init__(self):
            super().__init__(bidirectional=True)
            self.bn = nn.BatchNorm1d(16)

        def forward(self, x):
            o, _ = self.lstm(x)
            o = o[:, -1]
            return self.fc(self.bn(F.relu(o)))

    return M(), (torch.randn(6, 10, 3),), {}


@asked("HS109")
def c_for_decoder():
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.e = nn.LSTM(3, 8, batch_first=True)
            self.d = nn.LSTM(3, 8, batch_first=True)
            self.f = nn.Linear(8, 3)

        def forward(self, x, y):
            _, (h, c) = self.e(x)
            o, _ = self.d(y, (c, h))
            return self.f(o)

    return M(), (torch.randn(6, 10, 3), torch.randn(6, 7, 3)), {}


@asked("HS109")
def first_layer_gru():
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.g = nn.GRU(3, 8, 3, batch_first=True)
            self.f = nn.Linear(8, 1)

        def forward(self, x):
            _, h = self.g(x)
            return torch.sigmoid(self.f(h[0])).squeeze(1)

    return M(), (torch.randn(6, 10, 3),), {}


@asked("HS103")
def gru_loop_no_state():
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.g = nn.GRU(3, 8)
            self.f = nn.Linear(8, 1)

        def forward(self, x):
            for t in range(x.size(0)):
                o, h = self.g(x[t].unsqueeze(0))
            return self.f(o.squeeze(0))

    return M(), (torch.randn(10, 6, 3),), dict(batch_axis=1)


@asked("HS103")
def init_hidden_in_loop():
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.hs = 8
            self.i2h = nn.Linear(11, 8)
            self.o = nn.Linear(8, 2)

        def init_hidden(self, b):
            return torch.zeros(b, self.hs)

        def forward(self, x):
            outs = []
            for t in range(x.size(1)):
                hidden = self.init_hidden(x.size(0))
                hidden = torch.tanh(self.i2h(torch.cat([x[:, t], hidden], 1)))
                outs.append(self.o(hidden))
            return torch.stack(outs, 1)

    return M(), (torch.randn(6, 10, 3),), {}


@asked("HS103", "HS302")
def lstm_c_forgotten():
    class Cell(nn.Module):
        def __init__(self):
            super().__init__()
            self.input_size, self.hidden_size = 3, 8
            self.x = nn.Linear(3, 32)
            self.h = nn.Linear(8, 32)

        def forward(self, x, hx):
            h, c = hx
            i, f, g, o = (self.x(x) + self.h(h)).chunk(4, 1)
            c = torch.sigmoid(i) * torch.tanh(g)
            h = torch.sigmoid(o) * torch.tanh(c)
            return h, c

    return Cell(), (), {}


@asked("HS105")
def no_grad_state():
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.c = nn.GRUCell(3, 8)
            self.f = nn.Linear(8, 2)

        def forward(self, x):
            h = torch.zeros(x.size(0), 8)
            outs = []
            for t in range(x.size(1)):
                with torch.no_grad():
                    h = self.c(x[:, t], h)
                outs.append(self.f(h))
            return torch.stack(outs, 1)

    return M(), (torch.randn(6, 10, 3),), {}


@asked("HS105")
def detach_c():
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.c = nn.LSTMCell(3, 8)
            self.f = nn.Linear(8, 2)

        def forward(self, x):
            h = torch.zeros(x.size(0), 8)
            c = h.clone()
            for t in range(x.size(1)):
                h, c = self.c(x[:, t], (h, c))
                h = h.detach()
                c = c.detach()
            return self.f(h)

    return M(), (torch.randn(6, 10, 3),), {}


@asked("HS105")
def variable_wrap():
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.c = nn.LSTMCell(3, 8)
            self.f = nn.Linear(8, 2)

        def forward(self, x):
            h = torch.zeros(x.size(0), 8)
            c = h.clone()
            outs = []
            for t in range(x.size(1)):
                h, c = self.c(x[:, t], (torch.tensor(h.detach().numpy()), torch.tensor(c.detach().numpy())))
                outs.append(h)
            return self.f(torch.stack(outs, 1))

    return M(), (torch.randn(6, 10, 3),), {}


@asked("HS105")
def fused_steps_detach():
    class M(L):
        def forward(self, x):
            hc = None
            outs = []
            for t in range(x.size(1)):
                if hc is not None:
                    hc = tuple(v.detach() for v in hc)
                o, hc = self.lstm(x[:, t : t + 1], hc)
                outs.append(self.fc(o))
            return torch.cat(outs, 1)

    return M(), (torch.randn(6, 10, 3),), {}


@asked("HS106")
def hn_no_pack_bidir():
    class M(L):
        def __init__(self):
            super().__init__(bidirectional=True)

        def forward(self, x, l):
            _, (h, _) = self.lstm(x)
            return self.fc(torch.cat([h[-2], h[-1]], 1))

    l = torch.tensor([10, 4, 7, 2, 9, 5])
    x = torch.randn(6, 10, 3) * (torch.arange(10) < l[:, None])[..., None]
    return M(), (x, l), dict(lengths=l)


@asked("HS106")
def maxpool_padding():
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.e = nn.Embedding(30, 6, padding_idx=0)
            self.l = nn.LSTM(6, 8, batch_first=True)
            self.f = nn.Linear(8, 2)

        def forward(self, x):
            return self.f(self.l(self.e(x))[0].max(1)[0])

    l = torch.tensor([10, 4, 7, 2, 9, 5])
    x = torch.randint(1, 30, (6, 10))
    x[torch.arange(10) >= l[:, None]] = 0
    return M(), (x,), dict(lengths=l)


@asked("HS106")
def divide_by_T():
    class M(L):
        def forward(self, x, l):
            p = pack_padded_sequence(x, l.cpu(), batch_first=True, enforce_sorted=False)
            o, _ = pad_packed_sequence(self.lstm(p)[0], batch_first=True)
            return self.fc(o.mean(1))

    l = torch.tensor([10, 4, 7, 2, 9, 5])
    return M(), (torch.randn(6, 10, 3), l), dict(lengths=l)


@asked("HS106")
def off_by_one_gather():
    class M(L):
        def forward(self, x, l):
            o, _ = self.lstm(x)
            idx = l.clamp(max=x.size(1) - 1)
            return self.fc(o[torch.arange(len(x)), idx])

    l = torch.tensor([10, 4, 7, 2, 9, 5])
    return M(), (torch.randn(6, 10, 3), l), dict(lengths=l)


@asked("HS110")
def unsort_only_out():
    class M(L):
        def forward(self, x, l):
            ls, ix = l.sort(0, descending=True)
            _, (h, _) = self.lstm(pack_padded_sequence(x[ix], ls.cpu(), batch_first=True))
            return self.fc(h[-1])

    l = torch.tensor([10, 4, 7, 2, 9, 5])
    return M(), (torch.randn(6, 10, 3), l), {}


@asked("HS201")
def buffer_state():
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.g = nn.GRU(3, 8, batch_first=True)
            self.f = nn.Linear(8, 2)
            self.register_buffer("h", torch.zeros(1, 6, 8))

        def forward(self, x):
            o, h = self.g(x, self.h)
            self.h.copy_(h.detach())
            return self.f(o)

    return M(), (torch.randn(6, 10, 3),), {}


@asked("HS201")
def memory_list():
    class M(L):
        def __init__(self):
            super().__init__()
            self.mem = {"h": None}

        def forward(self, x):
            o, hc = self.lstm(x, self.mem["h"])
            self.mem["h"] = tuple(v.detach() for v in hc)
            return self.fc(o[:, -1])

    return M(), (torch.randn(6, 10, 3),), {}


@asked("HS203")
def init_hidden_tutorial():
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.e = nn.Embedding(30, 6)
            self.lstm = nn.LSTM(6, 8, batch_first=True)
            self.f = nn.Linear(8, 2)
            self.hidden = self.init_hidden(6)

        def init_hidden(self, b):
            return torch.zeros(1, b, 8), torch.zeros(1, b, 8)

        def forward(self, x):
            o, self.hidden = self.lstm(self.e(x), self.hidden)
            return F.log_softmax(self.f(o[:, -1]), 1)

    return M(), (torch.randint(30, (6, 10)),), {}


@asked("HS202")
def rand_hidden_init_method():
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.g = nn.GRU(3, 8, 2, batch_first=True)
            self.f = nn.Linear(8, 2)

        def init_hidden(self, b):
            return torch.rand(2, b, 8)

        def forward(self, x):
            return self.f(self.g(x, self.init_hidden(x.size(0)))[0])

    return M(), (torch.randn(6, 10, 3),), {}


@asked("HS202")
def xavier_hidden():
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.c = nn.LSTMCell(3, 8)
            self.f = nn.Linear(8, 2)

        def forward(self, x):
            h = torch.empty(x.size(0), 8)
            c = torch.empty(x.size(0), 8)
            nn.init.xavier_normal_(h)
            nn.init.xavier_normal_(c)
            for t in range(x.size(1)):
                h, c = self.c(x[:, t], (h, c))
            return self.f(h)

    return M(), (torch.randn(6, 10, 3),), {}


@asked("HS202")
def custom_rand_state():
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.hidden_size = 8
            self.W = nn.Linear(11, 8)
            self.f = nn.Linear(8, 2)

        def forward(self, x):
            h = torch.randn(x.size(0), 8)
            for t in range(x.size(1)):
                h = torch.tanh(self.W(torch.cat([x[:, t], h], 1)))
            return self.f(h)

    return M(), (torch.randn(6, 10, 3),), {}


@asked("HS204")
def fixed_view():
    class M(L):
        def __init__(self):
            super().__init__()
            self.bs = 6

        def forward(self, x):
            o, _ = self.lstm(x)
            return self.fc(o.reshape(self.bs, 10, 8)[:, -1])

    return M(), (torch.randn(6, 10, 3),), {}


@asked("HS204")
def hidden_batch_mismatch_call():
    class M(L):
        def __init__(self):
            super().__init__()
            self.batch_size = 32

        def forward(self, x):
            h = torch.zeros(1, self.batch_size, 8)
            return self.fc(self.lstm(x, (h, h))[0])

    return M(), (torch.randn(6, 10, 3),), {}


@asked("HS205")
def lstm_dict():
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.rnns = {"a": nn.LSTM(3, 8, batch_first=True)}
            self.f = nn.Linear(8, 2)

        def forward(self, x):
            return self.f(self.rnns["a"](x)[0][:, -1])

    return M(), (torch.randn(6, 10, 3),), {}


@asked("HS205")
def param_list():
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.g = nn.GRU(3, 8, batch_first=True)
            self.w = [nn.Parameter(torch.randn(8, 2)), nn.Parameter(torch.zeros(2))]

        def forward(self, x):
            return self.g(x)[0][:, -1] @ self.w[0] + self.w[1]

    return M(), (torch.randn(6, 10, 3),), {}


@asked("HS205")
def plain_weights():
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.hidden_size = 8
            self.Wx = torch.randn(3, 8) * 0.3
            self.Wh = torch.randn(8, 8) * 0.3
            self.f = nn.Linear(8, 2)

        def forward(self, x):
            h = torch.zeros(len(x), 8)
            for t in range(x.size(1)):
                h = torch.tanh(x[:, t] @ self.Wx + h @ self.Wh)
            return self.f(h)

    return M(), (torch.randn(6, 10, 3),), {}


@asked("HS205")
def positional_plain():
    class M(L):
        def __init__(self):
            super().__init__()
            self.pe = torch.randn(1, 50, 3)

        def forward(self, x):
            return self.fc(self.lstm(x + self.pe[:, : x.size(1)])[0])

    return M(), (torch.randn(6, 10, 3),), {}


@asked("HS206")
def h0_variable():
    class M(L):
        def __init__(self):
            super().__init__()
            self.h0 = torch.zeros(1, 1, 8).requires_grad_()
            self.c0 = torch.zeros(1, 1, 8).requires_grad_()

        def forward(self, x):
            b = x.size(0)
            return self.fc(self.lstm(x, (self.h0.repeat(1, b, 1), self.c0.repeat(1, b, 1)))[0])

    return M(), (torch.randn(6, 10, 3),), {}


@asked("HS206", "HS503")
def h0_unused():
    class M(L):
        def __init__(self):
            super().__init__()
            self.h0 = nn.Parameter(torch.zeros(1, 1, 8))

        def forward(self, x):
            return self.fc(self.lstm(x)[0])

    return M(), (torch.randn(6, 10, 3),), {}


@asked("HS206")
def h0_nograd():
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.hidden_init = nn.Parameter(torch.randn(1, 1, 8))
            self.g = nn.GRU(3, 8, batch_first=True)
            self.f = nn.Linear(8, 2)

        def forward(self, x):
            with torch.no_grad():
                h = self.hidden_init.expand(1, x.size(0), 8).contiguous()
            return self.f(self.g(x, h)[0])

    return M(), (torch.randn(6, 10, 3),), {}


@asked("HS207")
def zero_mask_state():
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.g = nn.GRU(3, 8, batch_first=True)
            self.f = nn.Linear(8, 2)

        def forward(self, x, hidden, done):
            hidden[:, done] = 0
            o, h = self.g(x, hidden)
            return self.f(o), h

    return M(), (torch.randn(6, 10, 3), torch.ones(1, 6, 8), torch.tensor([True, False, True, False, False, True])), {}


@asked("HS207")
def fillna_inplace():
    class M(L):
        def forward(self, x):
            x[x.isnan()] = 0
            x.clamp_(-1, 1)
            return self.fc(self.lstm(x)[0])

    return M(), (torch.randn(6, 10, 3) * 3,), {}


class C(nn.Module):
    def __init__(self):
        super().__init__()
        self.input_size, self.hidden_size = 3, 8
        self.z = nn.Linear(11, 8)
        self.r = nn.Linear(11, 8)
        self.n = nn.Linear(11, 8)


@asked("HS301")
def gru_double():
    class G(C):
        def forward(self, x, h):
            xh = torch.cat([x, h], 1)
            z = torch.sigmoid(torch.sigmoid(self.z(xh)))
            r = torch.sigmoid(self.r(xh))
            n = torch.tanh(self.n(torch.cat([x, r * h], 1)))
            return (1 - z) * h + z * n

    return G(), (), {}


@asked("HS301")
def tanh_module_twice():
    class G(nn.Module):
        def __init__(self):
            super().__init__()
            self.input_size, self.hidden_size = 3, 8
            self.l = nn.Sequential(nn.Linear(11, 8), nn.Tanh())

        def forward(self, x, h):
            return torch.tanh(self.l(torch.cat([x, h], 1)))

    return G(), (), {}


@asked("HS301")
def sigmoid_bcelogits():
    class M(L):
        def __init__(self):
            super().__init__(1)

        def forward(self, x):
            return torch.sigmoid(self.fc(self.lstm(x)[0][:, -1]).squeeze(1))

    return M(), (torch.randn(6, 10, 3),), dict(loss=nn.BCEWithLogitsLoss(), targets=torch.rand(6).round())


@asked("HS301")
def rnn_layer_tanh_in_model_loop():
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.hidden_size = 8
            self.a = nn.Linear(3, 8)
            self.b = nn.Linear(8, 8)
            self.f = nn.Linear(8, 2)

        def forward(self, x):
            h = torch.zeros(len(x), 8)
            o = []
            for t in range(x.size(1)):
                h = torch.tanh(self.a(x[:, t]) + self.b(h))
                h = torch.tanh(h)
                o.append(h)
            return self.f(torch.stack(o, 1))

    return M(), (torch.randn(6, 10, 3),), {}


@asked("HS302")
def reset_gate_unused():
    class G(C):
        def forward(self, x, h):
            xh = torch.cat([x, h], 1)
            z = torch.sigmoid(self.z(xh))
            r = torch.sigmoid(self.r(xh))
            n = torch.tanh(self.n(xh))
            return (1 - z) * h + z * n

    return G(), (), {}


@asked("HS302")
def forget_gate_unused_model():
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.W = nn.Linear(11, 32)
            self.f = nn.Linear(8, 2)

        def forward(self, x):
            h = c = torch.zeros(len(x), 8)
            for t in range(x.size(1)):
                i, f, g, o = self.W(torch.cat([x[:, t], h], 1)).chunk(4, 1)
                i, f, o = i.sigmoid(), f.sigmoid(), o.sigmoid()
                c = i * c + i * g.tanh()
                h = o * c.tanh()
            return self.f(h)

    return M(), (torch.randn(6, 10, 3),), {}


@asked("HS303", "HS302", "HS503")
def same_gate():
    class G(C):
        def forward(self, x, h):
            xh = torch.cat([x, h], 1)
            z = torch.sigmoid(self.z(xh))
            r = torch.sigmoid(self.z(xh))
            n = torch.tanh(self.n(torch.cat([x, r * h], 1)))
            return z * h + (1 - z) * n

    return G(), (), {}


@asked("HS303")
def constant_init():
    m = nn.LSTM(3, 8, batch_first=True)
    for p in m.parameters():
        nn.init.constant_(p, 0.1)
    return m, (torch.randn(6, 10, 3),), {}


@asked("HS304")
def update_gate_raw():
    class G(C):
        def forward(self, x, h):
            xh = torch.cat([x, h], 1)
            z = self.z(xh)
            r = torch.sigmoid(self.r(xh))
            n = torch.tanh(self.n(torch.cat([x, r * h], 1)))
            return (1 - z) * h + z * n

    return G(), (), {}


@asked("HS304")
def gru_plus():
    class G(C):
        def forward(self, x, h):
            xh = torch.cat([x, h], 1)
            z = torch.sigmoid(self.z(xh))
            r = torch.sigmoid(self.r(xh))
            n = torch.tanh(self.n(torch.cat([x, r * h], 1)))
            return h + z * n

    return G(), (), {}


@asked("HS305")
def dropout_gru():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return nn.GRU(3, 8, dropout=0.2, batch_first=True), (torch.randn(6, 10, 3),), {}


@asked("HS401")
def sqrt_neg():
    class M(L):
        def forward(self, x):
            return self.fc(self.lstm(x)[0]).sqrt()

    return M(), (torch.randn(6, 10, 3),), {}


@asked("HS401")
def weights_nan():
    m = L()
    with torch.no_grad():
        m.lstm.weight_hh_l0[0, 0] = float("nan")
    m.forward = lambda x: m.fc(m.lstm(x)[0])
    return m, (torch.randn(6, 10, 3),), {}


@asked("HS402")
def raw_prices():
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.g = nn.GRU(3, 8, batch_first=True)
            self.f = nn.Linear(8, 1)

        def forward(self, x):
            return self.f(self.g(x)[0][:, -1])

    return M(), (torch.randn(6, 10, 3) * 50 + 4000,), {}


@asked("HS403")
def dead_relu():
    m = nn.RNN(3, 16, nonlinearity="relu", batch_first=True)
    with torch.no_grad():
        m.bias_ih_l0.fill_(-20)
    return m, (torch.randn(6, 10, 3),), {}


@asked("HS404", "HS104")
def zero_emb():
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.e = nn.Embedding(30, 6)
            nn.init.constant_(self.e.weight, 0.5)
            self.l = nn.LSTM(6, 8, batch_first=True)
            self.f = nn.Linear(8, 2)

        def forward(self, x):
            return self.f(self.l(self.e(x))[0])

    return M(), (torch.randint(30, (6, 10)),), {}


@asked("HS501")
def vanish_rnn():
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.r = nn.RNN(3, 16, batch_first=True)
            self.f = nn.Linear(16, 2)

        def forward(self, x):
            return self.f(self.r(x)[0][:, -1])

    return M(), (torch.randn(6, 100, 3),), {}


@asked("HS502")
def explode():
    m = nn.RNN(3, 16, nonlinearity="relu", batch_first=True)
    with torch.no_grad():
        nn.init.orthogonal_(m.weight_hh_l0)
        m.weight_hh_l0.mul_(2.5)
    return m, (torch.randn(6, 30, 3),), {}


@asked("HS503")
def unused_layer():
    class M(L):
        def __init__(self):
            super().__init__()
            self.lstm2 = nn.LSTM(8, 8, batch_first=True)

        def forward(self, x):
            o, _ = self.lstm(x)
            _, _ = self.lstm2(o)
            return self.fc(o[:, -1])

    return M(), (torch.randn(6, 10, 3),), {}


@asked("HS504")
def opt_head_only():
    m = L()
    m.forward = lambda x: m.fc(m.lstm(x)[0])
    return m, (torch.randn(6, 10, 3),), dict(optimizer=torch.optim.SGD(m.fc.parameters(), lr=0.1))


@asked("HS101")
def wrong_stack():
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.c = nn.GRUCell(3, 8)
            self.f = nn.Linear(8, 2)

        def forward(self, x):
            h = torch.zeros(len(x), 8)
            o = []
            for t in range(x.size(1)):
                h = self.c(x[:, t], h)
                o.append(h)
            return self.f(torch.stack(o).view(x.size(0), x.size(1), -1))

    return M(), (torch.randn(6, 10, 3),), {}


@asked("HS101", "HS109")
def hn_reshape_layers():
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.g = nn.GRU(3, 8, 2, batch_first=True)
            self.f = nn.Linear(16, 2)

        def forward(self, x):
            _, h = self.g(x)
            return self.f(h.reshape(-1, 16))

    return M(), (torch.randn(6, 10, 3),), {}


@asked("HS101")
def instance_std_all():
    class M(L):
        def forward(self, x):
            x = (x - x.mean()) / x.std()
            return self.fc(self.lstm(x)[0][:, -1])

    return M(), (torch.randn(6, 10, 3),), {}


@asked("HS101")
def log_softmax_dim0():
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.e = nn.Embedding(30, 6)
            self.l = nn.LSTM(6, 8, batch_first=True)
            self.f = nn.Linear(8, 30)

        def forward(self, x):
            return F.log_softmax(self.f(self.l(self.e(x))[0]), dim=0)

    return M(), (torch.randint(30, (6, 10)),), {}


@asked("HS101")
def tabular_as_sequence():
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.l = nn.LSTM(5, 8, batch_first=True)
            self.f = nn.Linear(8, 1)

        def forward(self, x):
            o, _ = self.l(x)
            return self.f(o)

    return M(), (torch.randn(16, 5),), {}


@asked("HS108")
def returns_zero_state():
    class M(L):
        def forward(self, x, state=None):
            o, st = self.lstm(x, state)
            return self.fc(o), tuple(torch.zeros_like(v) for v in st)

    return M(), (torch.randn(6, 10, 3),), {}


@asked("HS108", "HS103")
def ignores_state_default():
    class M(L):
        def forward(self, x, hidden=None):
            o, hidden = self.lstm(x)
            return self.fc(o), hidden

    return M(), (torch.randn(6, 10, 3),), {}


@asked("HS108")
def only_h():
    class M(L):
        def forward(self, x, state=None):
            if state is not None:
                state = (state[0], torch.zeros_like(state[1]))
            o, st = self.lstm(x, state)
            return self.fc(o), st

    return M(), (torch.randn(6, 10, 3),), {}


@asked("HS108")
def stateful_half():
    class M(L):
        def __init__(self):
            super().__init__()
            self.h = None

        def reset(self):
            self.h = None

        def forward(self, x):
            st = None if self.h is None else (self.h, torch.zeros_like(self.h))
            o, (h, c) = self.lstm(x, st)
            self.h = h.detach()
            return self.fc(o)

    return M(), (torch.randn(6, 10, 3),), {}


@asked("HS104")
def embed_unused():
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.e = nn.Embedding(30, 6)
            self.l = nn.LSTM(6, 8, batch_first=True)
            self.f = nn.Linear(8, 2)

        def forward(self, x):
            e = self.e(torch.zeros_like(x))
            return self.f(self.l(e)[0][:, -1])

    return M(), (torch.randint(30, (6, 10)),), {}


@asked("HS102", "HS109")
def hidden_chained_over_layers():
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList([nn.LSTM(8, 8, batch_first=True) for _ in range(2)])
            self.i = nn.Linear(3, 8)
            self.f = nn.Linear(8, 2)

        def forward(self, x):
            o = self.i(x)
            hid = None
            for l in self.layers:
                o, hid = l(o, hid)
            return self.f(o)

    return M(), (torch.randn(6, 10, 3),), {}


@asked("HS101", "HS109")
def bidir_view_last_layer():
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.g = nn.GRU(3, 8, 2, batch_first=True, bidirectional=True)
            self.f = nn.Linear(16, 2)

        def forward(self, x):
            _, h = self.g(x)
            h = h.view(2, 2, x.size(0), 8)[-1]
            return self.f(h.reshape(x.size(0), -1))

    return M(), (torch.randn(6, 10, 3),), {}


@asked("HS101")
def bmm_batch_mix():
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.g = nn.GRU(3, 8, batch_first=True)
            self.f = nn.Linear(8, 2)

        def forward(self, x):
            o, h = self.g(x)
            h = h[-1]
            w = F.softmax(h @ h.t(), -1)
            return self.f(w @ h)

    return M(), (torch.randn(6, 10, 3),), {}


@asked("HS101")
def norm_whole():
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.g = nn.GRU(3, 8, batch_first=True)
            self.f = nn.Linear(8, 2)

        def forward(self, x):
            o, _ = self.g(x)
            o = o / o.norm()
            return self.f(o[:, -1])

    return M(), (torch.randn(6, 10, 3),), {}


@asked("HS105")
def argmax_feedback_no():
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.c = nn.GRUCell(3, 8)
            self.f = nn.Linear(8, 2)

        def forward(self, x):
            h = x.new_zeros(x.size(0), 8)
            for t in range(x.size(1)):
                h = torch.from_numpy(self.c(x[:, t], h).detach().numpy())
            return self.f(h)

    return M(), (torch.randn(6, 10, 3),), {}


@asked("HS103")
def wrong_var():
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.c = nn.GRUCell(3, 8)
            self.f = nn.Linear(8, 2)

        def forward(self, x):
            h0 = x.new_zeros(x.size(0), 8)
            o = []
            for t in range(x.size(1)):
                h1 = self.c(x[:, t], h0)
                o.append(h1)
            return self.f(torch.stack(o, 1))

    return M(), (torch.randn(6, 10, 3),), {}


@asked("HS104")
def overwritten_input():
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.e = nn.Linear(3, 8)
            self.g = nn.GRU(8, 8, batch_first=True)
            self.f = nn.Linear(8, 2)

        def forward(self, x):
            x = self.e(x)
            x = torch.zeros(x.size(0), x.size(1), 8)
            return self.f(self.g(x)[0][:, -1])

    return M(), (torch.randn(6, 10, 3),), {}


@asked("HS503", "HS302")
def second_rnn_skipped():
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = nn.GRU(3, 8, batch_first=True)
            self.b = nn.GRU(8, 8, batch_first=True)
            self.f = nn.Linear(8, 2)

        def forward(self, x):
            o, _ = self.a(x)
            return self.f(o[:, -1])

    return M(), (torch.randn(6, 10, 3),), {}


@asked("HS106")
def layernorm_conv_ok_attention_pad():
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.e = nn.Embedding(30, 8, padding_idx=0)
            self.g = nn.GRU(8, 8, batch_first=True)
            self.a = nn.Linear(8, 1)
            self.f = nn.Linear(8, 2)

        def forward(self, x):
            o, _ = self.g(self.e(x))
            w = torch.softmax(self.a(o), 1)
            return self.f((w * o).sum(1))

    L = torch.tensor([10, 4, 7, 2, 9, 5])
    x = torch.randint(1, 30, (6, 10))
    x[torch.arange(10) >= L[:, None]] = 0
    return M(), (x,), dict(lengths=L)


@asked("HS402")
def weights_huge():
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.g = nn.RNN(3, 8, batch_first=True)
            self.f = nn.Linear(8, 2)

        def forward(self, x):
            return self.f(self.g(x)[0])

    m = M()
    with torch.no_grad():
        for p in m.g.parameters():
            p.mul_(50)
    return m, (torch.randn(6, 10, 3),), {}


@asked("HS205")
def hidden_on_cpu_attr():
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.g = nn.GRU(3, 8, batch_first=True)
            self.f = nn.Linear(8, 2)
            self.h0 = torch.zeros(1, 6, 8)

        def forward(self, x):
            return self.f(self.g(x, self.h0)[0])

    return M(), (torch.randn(6, 10, 3),), {}
