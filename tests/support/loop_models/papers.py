"""Recurrent cells of later papers, in the style of their code."""

from __future__ import annotations

import math

import torch
from torch import nn
from torch.nn import functional as F

from .case import FEATURES, UNITS, Family, normal, series

case = Family("papers")


@case(series())
class HyperRNN(nn.Module):
    """A small network writes scales for the weights of the big one in each step."""

    def __init__(self, hyper=5):
        super().__init__()
        self.hyper = nn.GRUCell(FEATURES + UNITS, hyper)
        self.scale_x, self.scale_h = nn.Linear(hyper, UNITS), nn.Linear(hyper, UNITS)
        self.wx, self.wh = nn.Linear(FEATURES, UNITS, bias=False), nn.Linear(UNITS, UNITS, bias=False)

    def forward(self, x):
        h = x.new_zeros(x.size(0), UNITS)
        z = x.new_zeros(x.size(0), 5)
        out = []
        for x_t in x.unbind(1):
            z = self.hyper(torch.cat([x_t, h], -1), z)
            h = torch.tanh(self.scale_x(z) * self.wx(x_t) + self.scale_h(z) * self.wh(h))
            out.append(h)
        return torch.stack(out, 1)


@case(series())
class MogrifierLSTM(nn.Module):
    """Input and state modulate each other in rounds before the cell."""

    def __init__(self, rounds=4):
        super().__init__()
        self.q, self.r, self.rounds = nn.Linear(UNITS, FEATURES), nn.Linear(FEATURES, UNITS), rounds
        self.cell = nn.LSTMCell(FEATURES, UNITS)

    def mogrify(self, xt, ht):
        for i in range(1, self.rounds + 1):
            if i % 2 == 0:
                ht = (2 * torch.sigmoid(self.r(xt))) * ht
            else:
                xt = (2 * torch.sigmoid(self.q(ht))) * xt
        return xt, ht

    def forward(self, x, init_states=None):
        if init_states is None:
            ht = torch.zeros((x.shape[0], UNITS)).to(x)
            Ct = torch.zeros((x.shape[0], UNITS)).to(x)
        else:
            ht, Ct = init_states
        hidden_seq = []
        for t in range(x.size(1)):
            xt, ht = self.mogrify(x[:, t, :], ht)
            ht, Ct = self.cell(xt, (ht, Ct))
            hidden_seq.append(ht.unsqueeze(0))
        hidden_seq = torch.cat(hidden_seq, dim=0).transpose(0, 1).contiguous()
        return hidden_seq, (ht, Ct)


@case(series())
class ScalarXLSTM(nn.Module):
    """sLSTM of xLSTM: exponential gates, held finite by a running stabilizer."""

    def __init__(self):
        super().__init__()
        self.w, self.r = nn.Linear(FEATURES, 4 * UNITS), nn.Linear(UNITS, 4 * UNITS, bias=False)

    def forward(self, x):
        B = x.size(0)
        c, n, h, m = x.new_zeros(4, B, UNITS).unbind(0)
        ys = []
        for wx in self.w(x).unbind(1):
            i, f, z, o = (wx + self.r(h)).chunk(4, -1)
            log_f = F.logsigmoid(f)
            m_new = torch.maximum(log_f + m, i)
            i, f = torch.exp(i - m_new), torch.exp(log_f + m - m_new)
            c = f * c + i * torch.tanh(z)
            n = f * n + i
            h = torch.sigmoid(o) * c / n.clamp(min=1e-6)
            m = m_new
            ys.append(h)
        return torch.stack(ys, 1)


@case(series())
class MatrixXLSTM(nn.Module):
    """mLSTM of xLSTM: a matrix memory, a normalizer and a scalar stabilizer per head."""

    def __init__(self, heads=2, d=4):
        super().__init__()
        self.h, self.d = heads, d
        self.qkv, self.gates = nn.Linear(FEATURES, 3 * heads * d), nn.Linear(FEATURES, 2 * heads)

    def forward(self, x):
        B, S, _ = x.shape
        q, k, v = self.qkv(x).view(B, S, 3, self.h, self.d).unbind(2)
        ig, fg = self.gates(x).chunk(2, -1)
        C = x.new_zeros(B, self.h, self.d, self.d)
        n = x.new_zeros(B, self.h, self.d)
        m = x.new_zeros(B, self.h)
        out = []
        for t in range(S):
            log_f, i_t = F.logsigmoid(fg[:, t]), ig[:, t]
            m_new = torch.max(log_f + m, i_t)
            f, i = (log_f + m - m_new).exp()[..., None], (i_t - m_new).exp()[..., None]
            k_t = k[:, t] / math.sqrt(self.d)
            C = f[..., None] * C + i[..., None] * (v[:, t].unsqueeze(-1) * k_t.unsqueeze(-2))
            n = f * n + i * k_t
            m = m_new
            den = (n * q[:, t]).sum(-1, keepdim=True).abs().clamp(min=1.0)
            out.append((torch.matmul(C, q[:, t].unsqueeze(-1)).squeeze(-1) / den).flatten(1))
        return torch.stack(out, 1)


@case(series())
class RealGatedLRU(nn.Module):
    """RG-LRU of Griffin: the decay is a power of a learned one, by a gate of the input."""

    def __init__(self, c=8.0):
        super().__init__()
        self.inp, self.gate_a, self.gate_x = (nn.Linear(FEATURES, UNITS) for _ in range(3))
        self.a_param, self.c = nn.Parameter(torch.rand(UNITS) + 2), c

    def forward(self, x):
        u = self.inp(x)
        log_a = -self.c * torch.sigmoid(self.gate_a(x)) * F.softplus(-self.a_param)
        a = torch.exp(log_a)
        gated = torch.sqrt(-torch.expm1(2 * log_a)) * torch.sigmoid(self.gate_x(x)) * u
        h = torch.zeros_like(gated[:, 0])
        y = torch.zeros_like(gated)
        for t in range(x.shape[1]):
            h = a[:, t] * h + gated[:, t]
            y[:, t] = h
        return y


@case(series())
class TestTimeTraining(nn.Module):
    """TTT-linear: each step takes one step of descent on a reconstruction, with the gradient written out."""

    def __init__(self, d=6, lr=0.1):
        super().__init__()
        self.theta_k, self.theta_v, self.theta_q = (nn.Linear(FEATURES, d, bias=False) for _ in range(3))
        self.W0, self.lr = nn.Parameter(torch.randn(d, d) * 0.1), lr

    def forward(self, x):
        W = self.W0.unsqueeze(0).expand(x.size(0), -1, -1)
        outs = []
        for x_t in x.unbind(1):
            k, v, q = self.theta_k(x_t), self.theta_v(x_t), self.theta_q(x_t)
            err = torch.einsum("bij,bj->bi", W, k) - v
            W = W - self.lr * 2 * torch.einsum("bi,bj->bij", err, k)
            outs.append(torch.einsum("bij,bj->bi", W, q))
        return torch.stack(outs, 1)


@case(series())
class GatedDeltaNet(nn.Module):
    def __init__(self, h=2, d=4):
        super().__init__()
        self.h, self.d = h, d
        self.q, self.k, self.v = (nn.Linear(FEATURES, h * d, bias=False) for _ in range(3))
        self.alpha, self.beta = nn.Linear(FEATURES, h), nn.Linear(FEATURES, h)
        self.norm = nn.RMSNorm(d)

    def forward(self, x):
        q, k, v = (f(x).unflatten(-1, (self.h, self.d)) for f in (self.q, self.k, self.v))
        q, k = F.normalize(q, p=2, dim=-1), F.normalize(k, p=2, dim=-1)
        alpha, beta = torch.exp(-F.softplus(self.alpha(x))), self.beta(x).sigmoid()
        S = x.new_zeros(x.shape[0], self.h, self.d, self.d)
        o = torch.zeros_like(v)
        for i in range(x.shape[1]):
            S = S * alpha[:, i, :, None, None]
            kv_mem = (S * k[:, i, :, :, None]).sum(dim=-2)
            delta = (v[:, i] - kv_mem) * beta[:, i, :, None]
            S = S + k[:, i, :, :, None] * delta[:, :, None, :]
            o[:, i] = (S * q[:, i, :, :, None]).sum(dim=-2)
        return self.norm(o).flatten(-2)


@case(series())
class LongExpressiveMemory(nn.Module):
    """LEM: two states with learned time steps each."""

    def __init__(self, dt=0.5):
        super().__init__()
        self.inp2hid, self.hid2hid = nn.Linear(FEATURES, 4 * UNITS), nn.Linear(UNITS, 3 * UNITS)
        self.transform_z, self.dt = nn.Linear(UNITS, UNITS), dt

    def forward(self, x):
        y, z = x.data.new_zeros(x.size(0), UNITS), x.data.new_zeros(x.size(0), UNITS)
        for x_t in x.unbind(1):
            i_dt1, i_dt2, i_z, i_y = self.inp2hid(x_t).chunk(4, 1)
            h_dt1, h_dt2, h_y = self.hid2hid(y).chunk(3, 1)
            ms_dt_bar = self.dt * torch.sigmoid(i_dt1 + h_dt1)
            ms_dt = self.dt * torch.sigmoid(i_dt2 + h_dt2)
            z = (1.0 - ms_dt) * z + ms_dt * torch.tanh(i_y + h_y)
            y = (1.0 - ms_dt_bar) * y + ms_dt_bar * torch.tanh(self.transform_z(z) + i_z)
        return y


@case(series())
class BistableCell(nn.Module):
    """nBRC: a gain above one makes a unit latch."""

    def __init__(self):
        super().__init__()
        self.U = nn.Linear(FEATURES, 3 * UNITS)
        self.Wa, self.Wc = nn.Linear(UNITS, UNITS), nn.Linear(UNITS, UNITS)

    def forward(self, x):
        h = torch.zeros(x.shape[0], UNITS, dtype=x.dtype)
        for u in self.U(x).unbind(dim=1):
            ua, uc, uh = u.tensor_split(3, dim=-1)
            a = 1 + torch.tanh(ua + self.Wa(h))
            c = torch.sigmoid(uc + self.Wc(h))
            h = c * h + (1 - c) * torch.tanh(uh + a * h)
        return h


@case(series())
class NestedLSTM(nn.Module):
    """The cell of the outer LSTM is an inner LSTM."""

    def __init__(self):
        super().__init__()
        self.outer, self.inner = nn.Linear(FEATURES + UNITS, 4 * UNITS), nn.Linear(2 * UNITS, 4 * UNITS)

    def forward(self, x):
        state = [x.new_zeros(x.size(0), UNITS) for _ in range(3)]
        for t in range(x.size(1)):
            h, c, inner_c = state
            i, f, g, o = self.outer(torch.cat((x[:, t], h), 1)).chunk(4, 1)
            inner_x, inner_h = i.sigmoid() * g.tanh(), f.sigmoid() * c
            i2, f2, g2, o2 = self.inner(torch.cat((inner_x, inner_h), 1)).chunk(4, 1)
            inner_c = f2.sigmoid() * inner_c + i2.sigmoid() * g2.tanh()
            c = o2.sigmoid() * inner_c.tanh()
            state = [o.sigmoid() * c.tanh(), c, inner_c]
        return state


@case(series())
class SecondOrderRNN(nn.Module):
    """A bilinear term between input and state, by nn.Bilinear and by a three-way tensor."""

    def __init__(self):
        super().__init__()
        self.bilinear = nn.Bilinear(FEATURES, UNITS, UNITS)
        self.T = nn.Parameter(torch.randn(UNITS, UNITS, 3) * 0.1)
        self.reduce = nn.Linear(FEATURES, 3)

    def forward(self, x):
        h = x.new_zeros(x.size(0), UNITS)
        for t in range(x.size(1)):
            tri = torch.einsum("bi,ijk,bk->bj", h, self.T, self.reduce(x[:, t]))
            h = torch.tanh(self.bilinear(x[:, t], h) + tri)
        return h


@case(series())
class DifferentiablePlasticity(nn.Module):
    """Backpropamine: a trace per connection, its rate set by a neuromodulator of the state."""

    def __init__(self):
        super().__init__()
        self.i2h = nn.Linear(FEATURES, UNITS)
        self.w, self.alpha = nn.Parameter(0.1 * torch.randn(UNITS, UNITS)), nn.Parameter(0.1 * torch.rand(UNITS, UNITS))
        self.h2mod = nn.Linear(UNITS, 1)

    def forward(self, x):
        hidden = x.new_zeros(x.size(0), UNITS)
        hebb = x.new_zeros(x.size(0), UNITS, UNITS)
        for inputs in x.unbind(1):
            w = self.w + torch.mul(self.alpha, hebb)
            hactiv = torch.tanh(self.i2h(inputs).unsqueeze(1) + hidden.unsqueeze(1).bmm(w)).squeeze(1)
            mod = torch.tanh(self.h2mod(hactiv)).unsqueeze(2)
            hebb = torch.clamp(hebb + mod * torch.bmm(hidden.unsqueeze(2), hactiv.unsqueeze(1)), min=-1.0, max=1.0)
            hidden = hactiv
        return hidden, hebb


@case(series())
class BlockRecurrentTransformer(nn.Module):
    """A few state tokens attend to each input token's projection and to themselves; gated update."""

    def __init__(self, slots=3, d=8):
        super().__init__()
        self.slots = nn.Parameter(torch.randn(slots, d) * 0.2)
        self.inp, self.attn = nn.Linear(FEATURES, d), nn.MultiheadAttention(d, 2, batch_first=True)
        self.norm, self.gate = nn.LayerNorm(d), nn.Parameter(torch.zeros(d))
        self.ff = nn.Sequential(nn.Linear(d, 2 * d), nn.GELU(), nn.Linear(2 * d, d))

    def forward(self, x):
        state = self.slots.expand(x.size(0), -1, -1)
        outs = []
        for token in self.inp(x).split(1, dim=1):
            kv = torch.cat([state, token], dim=1)
            attended, _ = self.attn(self.norm(state), kv, kv, need_weights=False)
            z = attended + self.ff(attended)
            g = torch.sigmoid(self.gate)
            state = g * state + (1 - g) * z
            outs.append(state.mean(1))
        return torch.stack(outs, 1)


@case(lambda batch, steps: (normal(batch, steps, 5, 2), normal(5, 5).softmax(-1)))
class GraphGRU(nn.Module):
    """DCRNN: gates by diffusion over a graph, one state per node."""

    def __init__(self, hops=2, hidden=8):
        super().__init__()
        self.hops, self.hidden = hops, hidden
        self.gates = nn.Linear((2 + hidden) * (hops + 1), 2 * hidden)
        self.cand = nn.Linear((2 + hidden) * (hops + 1), hidden)
        self.readout = nn.Linear(hidden, 1)

    def diffuse(self, z, A):
        terms = [z]
        for _ in range(self.hops):
            terms.append(torch.einsum("nm,bmf->bnf", A, terms[-1]))
        return torch.cat(terms, -1)

    def forward(self, x, A):
        h = x.new_zeros(x.size(0), x.size(2), self.hidden)
        preds = []
        for t in range(x.size(1)):
            r, u = torch.sigmoid(self.gates(self.diffuse(torch.cat([x[:, t], h], -1), A))).chunk(2, -1)
            c = torch.tanh(self.cand(self.diffuse(torch.cat([x[:, t], r * h], -1), A)))
            h = u * h + (1 - u) * c
            preds.append(self.readout(h))
        return torch.stack(preds, 1)


@case(series())
class ClockworkByMask(nn.Module):
    """Clockwork RNN in tensors: a mask of (time, unit) made before the loop says who moves."""

    def __init__(self):
        super().__init__()
        self.w, self.u = nn.Linear(FEATURES, UNITS), nn.Linear(UNITS, UNITS)
        self.register_buffer("periods", 2 ** torch.arange(4).repeat_interleave(UNITS // 4))

    def forward(self, x):
        ticks = (torch.arange(x.size(1))[:, None] % self.periods == 0).to(x.dtype)
        h = x.new_zeros(x.size(0), UNITS)
        for x_t, tick in zip(x.unbind(1), ticks, strict=True):
            h = tick * torch.tanh(self.w(x_t) + self.u(h)) + (1 - tick) * h
        return h


@case(series())
class LipschitzRNN(nn.Module):
    """Symmetric-skew matrices made before the loop; a step of Euler with a learned nonlinearity."""

    def __init__(self, beta=0.75, gamma=0.001, eps=0.1):
        super().__init__()
        self.C, self.B = nn.Parameter(torch.randn(UNITS, UNITS) * 0.3), nn.Parameter(torch.randn(UNITS, UNITS) * 0.3)
        self.E, self.D = nn.Linear(FEATURES, UNITS), nn.Linear(UNITS, 3)
        self.beta, self.gamma, self.eps = beta, gamma, eps
        self.register_buffer("I", torch.eye(UNITS))

    def forward(self, x):
        sym = lambda M: (1 - self.beta) * (M + M.T) + self.beta * (M - M.T) - self.gamma * self.I  # noqa: E731
        A, W = sym(self.B), sym(self.C)
        h = torch.zeros(x.shape[0], UNITS, device=x.device, dtype=x.dtype)
        for i in range(x.shape[1]):
            z = self.E(x[:, i, :])
            h = h + self.eps * torch.matmul(h, A) + self.eps * torch.tanh(torch.matmul(h, W) + z)
        return self.D(h)
