"""Linear recurrences, filters and dynamic programs, written as loops."""

from __future__ import annotations

import math

import torch
from torch import nn
from torch.nn import functional as F

from .case import FEATURES, UNITS, Family, drawn_tokens, lengths, normal, series, tokens

case = Family("linear")


@case(series())
class DiagonalSSM(nn.Module):
    """S4D in real form: discretized once, one state of (batch, channel, n)."""

    def __init__(self, n=4):
        super().__init__()
        self.log_dt = nn.Parameter(torch.rand(FEATURES) - 3)
        self.A_log = nn.Parameter(torch.log(torch.arange(1, n + 1).float()).repeat(FEATURES, 1))
        self.B, self.C = nn.Parameter(torch.ones(FEATURES, n)), nn.Parameter(torch.randn(FEATURES, n))
        self.D = nn.Parameter(torch.ones(FEATURES))

    def forward(self, u):
        dt = torch.exp(self.log_dt)[:, None]
        A = -torch.exp(self.A_log)
        dA = torch.exp(A * dt)
        dB = (dA - 1) / A * self.B
        x = torch.zeros(u.size(0), *dA.shape, dtype=u.dtype)
        ys = []
        for k in range(u.size(1)):
            x = dA * x + dB * u[:, k, :, None]
            ys.append((x * self.C).sum(-1))
        return torch.stack(ys, 1) + u * self.D


@case(series())
class LRUInPairs(nn.Module):
    """Linear recurrent unit with real and imaginary parts kept apart."""

    def __init__(self):
        super().__init__()
        u1, u2 = torch.rand(UNITS), torch.rand(UNITS)
        self.nu = nn.Parameter(torch.log(-0.5 * torch.log(u1 * 0.8 + 0.1)))
        self.theta = nn.Parameter(torch.log(u2 * math.pi))
        self.in_re, self.in_im = nn.Linear(FEATURES, UNITS, False), nn.Linear(FEATURES, UNITS, False)
        self.out = nn.Linear(2 * UNITS, FEATURES)

    def forward(self, x):
        radius, phase = torch.exp(-torch.exp(self.nu)), torch.exp(self.theta)
        a, b = radius * torch.cos(phase), radius * torch.sin(phase)
        gamma = torch.sqrt(1 - radius**2)
        bu_re, bu_im = gamma * self.in_re(x), gamma * self.in_im(x)
        re = im = torch.zeros_like(bu_re[:, 0])
        states = []
        for t in range(x.shape[1]):
            re, im = a * re - b * im + bu_re[:, t], a * im + b * re + bu_im[:, t]
            states.append(torch.cat([re, im], dim=-1))
        return self.out(torch.stack(states, dim=1))


@case(series(), expect="may", why="the state is complex", doubles=False)
class ComplexLRU(nn.Module):
    def __init__(self):
        super().__init__()
        self.log_decay, self.freq = nn.Parameter(torch.rand(UNITS)), nn.Parameter(torch.rand(UNITS) * 3)
        self.B = nn.Parameter(torch.randn(FEATURES, UNITS, dtype=torch.cfloat) / 3)
        self.C = nn.Parameter(torch.randn(UNITS, FEATURES, dtype=torch.cfloat) / 3)

    def forward(self, u):
        lam = torch.exp(torch.complex(-self.log_decay.exp(), self.freq))
        Bu = u.to(torch.cfloat) @ self.B
        x = torch.zeros(u.size(0), UNITS, dtype=torch.cfloat)
        ys = []
        for Bu_t in Bu.unbind(1):
            x = lam * x + Bu_t
            ys.append((x @ self.C).real)
        return torch.stack(ys, 1)


@case(series())
class Retention(nn.Module):
    """RetNet's recurrent form: a matrix per head that decays, heads of a rank-4 state."""

    def __init__(self, heads=2, dim=4):
        super().__init__()
        self.heads, self.dim = heads, dim
        self.q, self.k, self.v = (nn.Linear(FEATURES, heads * dim, bias=False) for _ in range(3))
        self.register_buffer("decay", 1 - 2.0 ** (-5 - torch.arange(heads).float()))
        self.norm = nn.GroupNorm(heads, heads * dim)

    def forward(self, x):
        B, T, _ = x.shape
        q, k, v = (f(x).view(B, T, self.heads, self.dim) for f in (self.q, self.k, self.v))
        S = x.new_zeros(B, self.heads, self.dim, self.dim)
        out = []
        for n in range(T):
            S = self.decay.view(1, -1, 1, 1) * S + k[:, n].unsqueeze(-1) @ v[:, n].unsqueeze(-2)
            o = (q[:, n].unsqueeze(-2) @ S).squeeze(-2)
            out.append(self.norm(o.reshape(B, -1)))
        return torch.stack(out, 1)


@case(series())
class LinearTransformer(nn.Module):
    """Linear attention as an RNN: the matrix and the normalizer, einsum throughout."""

    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(FEATURES, 3 * 8)

    def forward(self, x):
        q, k, v = self.qkv(x).chunk(3, -1)
        q, k = F.elu(q) + 1, F.elu(k) + 1
        Si = x.new_zeros(x.size(0), 8, 8)
        Zi = x.new_zeros(x.size(0), 8)
        V = []
        for i in range(x.size(1)):
            Zi = Zi + k[:, i]
            Si = Si + torch.einsum("nd,nm->ndm", k[:, i], v[:, i])
            Z = 1.0 / (torch.einsum("nd,nd->n", q[:, i], Zi) + 1e-6)
            V.append(torch.einsum("nd,ndm,n->nm", q[:, i], Si, Z))
        return torch.stack(V, 1)


@case(series())
class DeltaRule(nn.Module):
    """DeltaNet: the memory moves towards what it should have answered, by a learned rate."""

    def __init__(self, d=8):
        super().__init__()
        self.wq, self.wk, self.wv = nn.Linear(FEATURES, d), nn.Linear(FEATURES, d), nn.Linear(FEATURES, d)
        self.beta = nn.Linear(FEATURES, 1)

    def forward(self, x):
        q, k, v = self.wq(x), F.normalize(self.wk(x), dim=-1), self.wv(x)
        beta = torch.sigmoid(self.beta(x))
        W = torch.zeros(x.size(0), v.size(-1), k.size(-1), dtype=x.dtype)
        ys = []
        for t in range(x.size(1)):
            v_old = torch.bmm(W, k[:, t].unsqueeze(2)).squeeze(2)
            W = W + beta[:, t].unsqueeze(2) * torch.bmm((v[:, t] - v_old).unsqueeze(2), k[:, t].unsqueeze(1))
            ys.append(torch.bmm(W, q[:, t].unsqueeze(2)).squeeze(2))
        return torch.stack(ys, 1)


@case(series())
class FastWeights(nn.Module):
    """Fast weights attend to the recent past: an inner loop settles the state, with layer norm."""

    def __init__(self, lam=0.95, eta=0.5, inner=2):
        super().__init__()
        self.lam, self.eta, self.inner = lam, eta, inner
        self.W_h, self.C = nn.Linear(UNITS, UNITS, bias=False), nn.Linear(FEATURES, UNITS)
        self.ln = nn.LayerNorm(UNITS)

    def forward(self, x):
        h = torch.zeros(x.size(0), UNITS, dtype=x.dtype)
        A = torch.zeros(x.size(0), UNITS, UNITS, dtype=x.dtype)
        for t in range(x.size(1)):
            boundary = self.W_h(h) + self.C(x[:, t])
            A = self.lam * A + self.eta * torch.einsum("bi,bj->bij", h, h)
            hs = torch.relu(boundary)
            for _ in range(self.inner):
                hs = torch.relu(self.ln(boundary + torch.bmm(A, hs[..., None])[..., 0]))
            h = hs
        return h


@case(series())
class RWKVTimeMix(nn.Module):
    """WKV of RWKV-4 with the running maximum, so that exponentials stay finite."""

    def __init__(self):
        super().__init__()
        self.time_decay, self.time_first = nn.Parameter(torch.rand(UNITS)), nn.Parameter(torch.rand(UNITS))
        self.key, self.value = nn.Linear(FEATURES, UNITS, bias=False), nn.Linear(FEATURES, UNITS, bias=False)
        self.receptance = nn.Linear(FEATURES, UNITS, bias=False)
        self.mix = nn.Parameter(torch.rand(FEATURES))

    def forward(self, x):
        shifted = F.pad(x, (0, 0, 1, -1))
        x = x * self.mix + shifted * (1 - self.mix)
        k, v, r = self.key(x), self.value(x), torch.sigmoid(self.receptance(x))
        w = -torch.exp(self.time_decay)
        aa = bb = torch.zeros_like(k[:, 0])
        pp = torch.full_like(k[:, 0], -1e38)
        out = torch.zeros_like(v)
        for t in range(x.size(1)):
            kk, vv = k[:, t], v[:, t]
            ww = self.time_first + kk
            qq = torch.maximum(pp, ww)
            e1, e2 = torch.exp(pp - qq), torch.exp(ww - qq)
            out[:, t] = (e1 * aa + e2 * vv) / (e1 * bb + e2)
            ww = pp + w
            qq = torch.maximum(ww, kk)
            e1, e2 = torch.exp(ww - qq), torch.exp(kk - qq)
            aa, bb, pp = e1 * aa + e2 * vv, e1 * bb + e2, qq
        return r * out


@case(series())
class SelectiveScan(nn.Module):
    """The reference loop of Mamba's selective scan: (batch, channel, time), deltas of all steps before it."""

    def __init__(self, n=4):
        super().__init__()
        self.A_log = nn.Parameter(torch.log(torch.arange(1, n + 1).float()).repeat(FEATURES, 1))
        self.D = nn.Parameter(torch.ones(FEATURES))
        self.x_proj, self.dt_proj = nn.Linear(FEATURES, 1 + 2 * n, bias=False), nn.Linear(1, FEATURES)
        self.n = n

    def forward(self, x):
        dt, B, C = torch.split(self.x_proj(x), [1, self.n, self.n], dim=-1)
        delta = F.softplus(self.dt_proj(dt)).transpose(1, 2)
        u, A = x.transpose(1, 2), -torch.exp(self.A_log)
        state = A.new_zeros((x.shape[0], FEATURES, self.n))
        deltaA = torch.exp(torch.einsum("bdl,dn->bdln", delta, A))
        deltaB_u = torch.einsum("bdl,bln,bdl->bdln", delta, B, u)
        ys = []
        for i in range(u.shape[2]):
            state = deltaA[:, :, i] * state + deltaB_u[:, :, i]
            y = torch.einsum("bdn,bn->bd", state, C[:, i, :])
            ys.append(y)
        y = torch.stack(ys, dim=2)
        return (y + u * self.D[:, None]).transpose(1, 2)


@case(series(2))
class KalmanFilter(nn.Module):
    """Predict and update with a gain by a matrix inverse; noise covariances are learned."""

    def __init__(self, dim=4):
        super().__init__()
        self.F = nn.Parameter(torch.eye(dim) + 0.1 * torch.randn(dim, dim))
        self.H = nn.Parameter(torch.randn(2, dim) * 0.5)
        self.log_q, self.log_r = nn.Parameter(torch.zeros(dim)), nn.Parameter(torch.zeros(2))

    def forward(self, z):
        n = self.F.size(0)
        m = z.new_zeros(z.size(0), n, 1)
        P = torch.eye(n, dtype=z.dtype).expand(z.size(0), n, n)
        Q, R = torch.diag(self.log_q.exp()), torch.diag(self.log_r.exp())
        eye = torch.eye(n, dtype=z.dtype)
        means, loglik = [], 0.0
        for t in range(z.size(1)):
            m = self.F @ m
            P = self.F @ P @ self.F.T + Q
            S = self.H @ P @ self.H.T + R
            K = P @ self.H.T @ torch.linalg.inv(S)
            innovation = z[:, t, :, None] - self.H @ m
            m = m + K @ innovation
            P = (eye - K @ self.H) @ P
            loglik = loglik - (innovation.mT @ torch.linalg.solve(S, innovation)).squeeze(-1)
            means.append(m.squeeze(-1))
        return torch.stack(means, 1), loglik


@case(series(1), least=2)
class HoltWinters(nn.Module):
    """Level and trend with learned smoothing; the forecasts of one step ahead come out."""

    def __init__(self):
        super().__init__()
        self.alpha, self.beta = nn.Parameter(torch.tensor(0.3)), nn.Parameter(torch.tensor(-0.5))

    def forward(self, y):
        a, b = torch.sigmoid(self.alpha), torch.sigmoid(self.beta)
        level, trend = y[:, 0], torch.zeros_like(y[:, 0])
        forecast = []
        for t in range(1, y.shape[1]):
            forecast.append(level + trend)
            last, level = level, a * y[:, t] + (1 - a) * (level + trend)
            trend = b * (level - last) + (1 - b) * trend
        return torch.stack(forecast, 1)


def _with_done(batch, steps):
    done = (normal(batch, steps, salt=1) > 1).float()
    return normal(batch, steps, FEATURES), normal(batch, steps, salt=2), done


@case(_with_done)
class GeneralizedAdvantage(nn.Module):
    """GAE of reinforcement learning: backwards in time, written into a tensor, from a value head."""

    def __init__(self, gamma=0.99, lam=0.95):
        super().__init__()
        self.critic = nn.Sequential(nn.Linear(FEATURES, UNITS), nn.Tanh(), nn.Linear(UNITS, 1))
        self.gamma, self.lam = gamma, lam

    def forward(self, obs, rewards, dones):
        values = self.critic(obs).squeeze(-1)
        nextvalues = torch.cat([values[:, 1:], values[:, -1:]], 1)
        advantages = torch.zeros_like(rewards)
        lastgaelam = 0
        for t in reversed(range(rewards.shape[1])):
            nonterminal = 1.0 - dones[:, t]
            delta = rewards[:, t] + self.gamma * nextvalues[:, t] * nonterminal - values[:, t]
            advantages[:, t] = lastgaelam = delta + self.gamma * self.lam * nonterminal * lastgaelam
        return advantages, advantages + values


def _tagged(batch, steps):
    mask = torch.arange(steps) < lengths(batch, steps)[:, None]
    return normal(batch, steps, FEATURES), drawn_tokens(batch, steps) % 5, mask


@case(_tagged)
class LinearChainCRF(nn.Module):
    """The partition function by logsumexp, masked by length, minus the score of the tags."""

    def __init__(self, num_tags=5):
        super().__init__()
        self.emit = nn.Linear(FEATURES, num_tags)
        self.start_transitions = nn.Parameter(torch.randn(num_tags) * 0.1)
        self.end_transitions = nn.Parameter(torch.randn(num_tags) * 0.1)
        self.transitions = nn.Parameter(torch.randn(num_tags, num_tags) * 0.1)

    def forward(self, x, tags, mask):
        emissions, tags, mask = self.emit(x).transpose(0, 1), tags.t(), mask.t()
        return self._score(emissions, tags, mask) - self._normalizer(emissions, mask)

    def _score(self, emissions, tags, mask):
        rows = torch.arange(emissions.size(1))
        score = self.start_transitions[tags[0]] + emissions[0, rows, tags[0]]
        for i in range(1, emissions.size(0)):
            score = score + self.transitions[tags[i - 1], tags[i]] * mask[i]
            score = score + emissions[i, rows, tags[i]] * mask[i]
        last = tags[mask.long().sum(dim=0) - 1, rows]
        return score + self.end_transitions[last]

    def _normalizer(self, emissions, mask):
        score = self.start_transitions + emissions[0]
        for i in range(1, emissions.size(0)):
            next_score = score.unsqueeze(2) + self.transitions + emissions[i].unsqueeze(1)
            next_score = torch.logsumexp(next_score, dim=1)
            score = torch.where(mask[i].unsqueeze(1), next_score, score)
        return torch.logsumexp(score + self.end_transitions, dim=1)


@case(tokens())
class HiddenMarkov(nn.Module):
    """The forward algorithm with log-normalized parameters looked up by token."""

    def __init__(self, states=5, vocab=11):
        super().__init__()
        self.trans, self.emit = nn.Parameter(torch.randn(states, states)), nn.Parameter(torch.randn(states, vocab))
        self.prior = nn.Parameter(torch.randn(states))

    def forward(self, x):
        log_T, log_E = F.log_softmax(self.trans, dim=0), F.log_softmax(self.emit, dim=1)
        log_alpha = log_E[:, x[:, 0]].t() + F.log_softmax(self.prior, dim=0)
        for t in range(1, x.shape[1]):
            log_alpha = log_E[:, x[:, t]].t() + torch.logsumexp(log_T.unsqueeze(0) + log_alpha.unsqueeze(1), dim=2)
        return log_alpha.logsumexp(dim=1)


@case(series())
class GatedLinearAttention(nn.Module):
    """A data-dependent decay per key channel; the state is returned beside the outputs."""

    def __init__(self, d=6):
        super().__init__()
        self.wq, self.wk, self.wv, self.wg = (nn.Linear(FEATURES, d, bias=False) for _ in range(4))

    def forward(self, x):
        q, k, v, g = self.wq(x), self.wk(x), self.wv(x), F.logsigmoid(self.wg(x)) / 4
        o = torch.zeros_like(v)
        S = x.new_zeros(x.shape[0], k.shape[-1], v.shape[-1])
        for i in range(x.shape[1]):
            S = S * g[:, i].exp()[..., None] + k[:, i, :, None] * v[:, i, None, :]
            o[:, i] = (q[:, i, :, None] * S).sum(-2)
        return o, S


@case(series())
class MinGRU(nn.Module):
    """Were RNNs all we needed: gates of the input alone, in the sequential form."""

    def __init__(self):
        super().__init__()
        self.to_hidden_and_gate = nn.Linear(FEATURES, 2 * UNITS)
        self.to_out = nn.Linear(UNITS, FEATURES)

    def forward(self, x):
        hidden, gate = self.to_hidden_and_gate(x).chunk(2, dim=-1)
        hidden = torch.where(hidden >= 0, hidden + 0.5, hidden.sigmoid())
        gate = gate.sigmoid()
        h, out = torch.zeros_like(hidden[:, :1]), []
        for t in range(x.shape[1]):
            h = torch.lerp(h, hidden[:, t : t + 1], gate[:, t : t + 1])
            out.append(h)
        return x + self.to_out(torch.cat(out, dim=1))
