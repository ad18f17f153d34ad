"""Recurrent cells of papers which are not an LSTM or a GRU, each in a loop of its own."""

from __future__ import annotations

import math

import torch
from torch import nn
from torch.nn import functional as F

from .case import FEATURES, UNITS, Family, normal, series, time_first

case = Family("cells")


@case(time_first())
class ElmanByHand(nn.Module):
    """Raw matrices, time first, iterating over the tensor itself."""

    def __init__(self):
        super().__init__()
        self.Wxh = nn.Parameter(torch.randn(FEATURES, UNITS) * 0.3)
        self.Whh = nn.Parameter(torch.randn(UNITS, UNITS) * 0.3)
        self.Why = nn.Parameter(torch.randn(UNITS, 4) * 0.3)
        self.bh, self.by = nn.Parameter(torch.zeros(UNITS)), nn.Parameter(torch.zeros(4))

    def forward(self, xs):
        h = torch.zeros(xs.shape[1], UNITS, dtype=xs.dtype)
        ys = []
        for x in xs:
            h = torch.tanh(x @ self.Wxh + h @ self.Whh + self.bh)
            ys.append(h @ self.Why + self.by)
        return torch.stack(ys), h


@case(series())
class SimpleRecurrentUnit(nn.Module):
    """SRU: all products before the loop, a highway on the way out."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Linear(FEATURES, 4 * UNITS, bias=False)
        self.v = nn.Parameter(torch.randn(2 * UNITS) * 0.3)
        self.b = nn.Parameter(torch.zeros(2 * UNITS))

    def forward(self, x):
        u = self.weight(x).view(x.size(0), x.size(1), UNITS, 4)
        fv, rv = self.v.chunk(2)
        fb, rb = self.b.chunk(2)
        c = x.new_zeros(x.size(0), UNITS)
        hs = []
        for t in range(x.size(1)):
            u0, u1, u2, u3 = u[:, t].unbind(-1)
            f = (u1 + fv * c + fb).sigmoid()
            r = (u2 + rv * c + rb).sigmoid()
            c = f * c + (1 - f) * u0
            hs.append(r * F.relu(c) + (1 - r) * u3)
        return torch.stack(hs, 1), c


@case(series())
class IndRNN(nn.Module):
    """Each unit feeds back to itself alone."""

    def __init__(self):
        super().__init__()
        self.weight_ih = nn.Linear(FEATURES, UNITS)
        self.weight_hh = nn.Parameter(torch.rand(UNITS))

    def forward(self, x, hx=None):
        if hx is None:
            hx = torch.zeros(x.shape[0], UNITS, dtype=x.dtype)
        outputs = []
        for step in range(x.shape[1]):
            hx = F.relu(self.weight_ih(x[:, step]) + torch.mul(self.weight_hh, hx))
            outputs.append(hx)
        return torch.stack(outputs, 1), hx


def _with_gaps(batch, steps):
    x = normal(batch, steps, FEATURES)
    mask = (normal(batch, steps, FEATURES, salt=1) > 0).to(x.dtype)
    delta = normal(batch, steps, FEATURES, salt=2).abs()
    last = torch.where(mask.bool(), x, normal(batch, steps, FEATURES, salt=3))
    return torch.stack([x, last, mask, delta], 1), normal(1, FEATURES, salt=4)


@case(_with_gaps)
class GRUD(nn.Module):
    """GRU-D: inputs and state decay with the time since they were seen; four series in one tensor."""

    def __init__(self):
        super().__init__()
        self.zl = nn.Linear(2 * FEATURES + UNITS, UNITS)
        self.rl = nn.Linear(2 * FEATURES + UNITS, UNITS)
        self.hl = nn.Linear(2 * FEATURES + UNITS, UNITS)
        self.gamma_x_l = nn.Linear(FEATURES, FEATURES)
        self.gamma_h_l = nn.Linear(FEATURES, UNITS)

    def step(self, x, x_last_obsv, x_mean, h, mask, delta):
        delta_x = torch.exp(-torch.max(torch.zeros_like(delta), self.gamma_x_l(delta)))
        delta_h = torch.exp(-torch.max(torch.zeros_like(h), self.gamma_h_l(delta)))
        x = mask * x + (1 - mask) * (delta_x * x_last_obsv + (1 - delta_x) * x_mean)
        h = delta_h * h
        combined = torch.cat((x, h, mask), 1)
        z = torch.sigmoid(self.zl(combined))
        r = torch.sigmoid(self.rl(combined))
        h_tilde = torch.tanh(self.hl(torch.cat((x, r * h, mask), 1)))
        return (1 - z) * h + z * h_tilde

    def forward(self, input, x_mean):
        X, X_last, Mask, Delta = (torch.squeeze(one, dim=1) for one in input.split(1, dim=1))
        Hidden_State = X.new_zeros(X.size(0), UNITS)
        outputs = None
        for i in range(X.size(1)):
            Hidden_State = self.step(
                torch.squeeze(X[:, i : i + 1, :], dim=1),
                torch.squeeze(X_last[:, i : i + 1, :], dim=1),
                x_mean,
                Hidden_State,
                torch.squeeze(Mask[:, i : i + 1, :], dim=1),
                torch.squeeze(Delta[:, i : i + 1, :], dim=1),
            )
            if outputs is None:
                outputs = Hidden_State.unsqueeze(1)
            else:
                outputs = torch.cat((outputs, Hidden_State.unsqueeze(1)), 1)
        return outputs


@case(series(1))
class LMU(nn.Module):
    """Legendre memory: a fixed linear memory of the input beside a nonlinear state."""

    def __init__(self, order=8, theta=20.0):
        super().__init__()
        Q = torch.arange(order).float()
        R = (2 * Q + 1)[:, None] / theta
        i, j = torch.meshgrid(Q, Q, indexing="ij")
        A = R * torch.where(i < j, -torch.ones_like(i), (-1.0) ** (i - j + 1))
        self.register_buffer("A", torch.matrix_exp(A))
        self.register_buffer("B", (R * ((-1.0) ** Q)[:, None])[:, 0])
        self.e_x, self.e_h, self.e_m = nn.Linear(1, 1, False), nn.Linear(UNITS, 1, False), nn.Linear(order, 1, False)
        self.W_x, self.W_h, self.W_m = (nn.Linear(n, UNITS, False) for n in (1, UNITS, order))

    def forward(self, x):
        h = x.new_zeros(x.size(0), UNITS)
        m = x.new_zeros(x.size(0), self.A.size(0))
        output = []
        for t in range(x.size(1)):
            x_t = x[:, t, :]
            u = self.e_x(x_t) + self.e_h(h) + self.e_m(m)
            m = F.linear(m, self.A) + F.linear(u, self.B[:, None])
            h = torch.tanh(self.W_x(x_t) + self.W_h(h) + self.W_m(m))
            output.append(h)
        return torch.stack(output, dim=1), (h, m)


def _with_times(batch, steps):
    times = torch.cumsum(normal(batch, steps, salt=1).abs() + 0.1, 1)
    return normal(batch, steps, FEATURES), times


@case(_with_times)
class PhasedLSTM(nn.Module):
    """A time gate, open for a part of each unit's own period."""

    def __init__(self):
        super().__init__()
        self.cell = nn.LSTMCell(FEATURES, UNITS)
        self.tau = nn.Parameter(torch.exp(torch.linspace(0.0, 2.0, UNITS)))
        self.shift = nn.Parameter(torch.rand(UNITS))
        self.r_on, self.leak = 0.3, 0.001

    def time_gate(self, t):
        phi = torch.fmod(t[:, None] - self.shift, self.tau) / self.tau
        up, down = 2 * phi / self.r_on, 2 - 2 * phi / self.r_on
        return torch.where(phi < self.r_on / 2, up, torch.where(phi < self.r_on, down, self.leak * phi))

    def forward(self, x, times):
        h = c = x.new_zeros(x.size(0), UNITS)
        hs = []
        for x_t, t in zip(x.unbind(1), times.unbind(1), strict=True):
            h_new, c_new = self.cell(x_t, (h, c))
            k = self.time_gate(t)
            c = k * c_new + (1 - k) * c
            h = k * h_new + (1 - k) * h
            hs.append(h)
        return torch.stack(hs, 1)


@case(series())
class RecurrentHighway(nn.Module):
    """RHN: several transitions within one step, the input only at the first."""

    def __init__(self, depth=3):
        super().__init__()
        self.inp = nn.Linear(FEATURES, 2 * UNITS)
        self.rec = nn.ModuleList(nn.Linear(UNITS, 2 * UNITS) for _ in range(depth))

    def forward(self, x):
        s = x.new_zeros(x.size(0), UNITS)
        out = []
        for t in range(x.size(1)):
            for level, lin in enumerate(self.rec):
                z = lin(s) + (self.inp(x[:, t]) if level == 0 else 0)
                h, g = z.chunk(2, -1)
                g = torch.sigmoid(g - 1)
                s = torch.tanh(h) * g + s * (1 - g)
            out.append(s)
        return torch.stack(out, 1)


@case(series())
class QuasiRNN(nn.Module):
    """fo-pooling: a causal convolution makes all gates, the loop only pools."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv1d(FEATURES, 3 * UNITS, 2)

    def forward(self, x):
        z, f, o = self.conv(F.pad(x.transpose(1, 2), (1, 0))).transpose(1, 2).chunk(3, -1)
        z, f, o = z.tanh(), f.sigmoid(), o.sigmoid()
        c, h = None, []
        for z_t, f_t, o_t in zip(z.unbind(1), f.unbind(1), o.unbind(1), strict=True):
            c = (1 - f_t) * z_t if c is None else f_t * c + (1 - f_t) * z_t
            h.append(o_t * c)
        return torch.stack(h, 1)


@case(series(), least=2)  # batch norm cannot train on a single value
class LightGRU(nn.Module):
    """Li-GRU of speech recognition: batch norm on the products of all steps, ReLU candidates, no reset."""

    def __init__(self):
        super().__init__()
        self.w = nn.Linear(FEATURES, 2 * UNITS, bias=False)
        self.u = nn.Linear(UNITS, 2 * UNITS, bias=False)
        self.norm = nn.BatchNorm1d(2 * UNITS, momentum=0.05)

    def forward(self, x):
        w = self.w(x)
        w = self.norm(w.reshape(-1, w.shape[-1])).view_as(w)
        return self._ligru_cell(w, torch.zeros(x.shape[0], UNITS, dtype=x.dtype))

    def _ligru_cell(self, w, ht):
        hiddens = []
        for k in range(w.shape[1]):
            at, zt = (w[:, k] + self.u(ht)).chunk(2, 1)
            zt = torch.sigmoid(zt)
            ht = zt * ht + (1 - zt) * torch.relu(at)
            hiddens.append(ht)
        return torch.stack(hiddens, dim=1)


@case(series())
class AntisymmetricRNN(nn.Module):
    """The recurrent matrix is made antisymmetric in each step, as the code of the paper does."""

    def __init__(self, eps=0.1, gamma=0.01):
        super().__init__()
        self.eps, self.gamma = eps, gamma
        self.W = nn.Parameter(torch.randn(UNITS, UNITS) * 0.3)
        self.V, self.Vz = nn.Linear(FEATURES, UNITS), nn.Linear(FEATURES, UNITS)

    def forward(self, x):
        h = torch.zeros(x.size(0), UNITS, device=x.device, dtype=x.dtype)
        for t in range(x.size(1)):
            A = self.W - self.W.T - self.gamma * torch.eye(UNITS, device=x.device, dtype=x.dtype)
            hA = h @ A
            z = torch.sigmoid(hA + self.Vz(x[:, t]))
            h = h + self.eps * z * torch.tanh(hA + self.V(x[:, t]))
        return h


@case(series())
class FastGRNN(nn.Module):
    """Two learned scalars mix gate and candidate; the matrices are of low rank."""

    def __init__(self, rank=4):
        super().__init__()
        self.W1, self.W2 = nn.Parameter(torch.randn(FEATURES, rank) * 0.3), nn.Parameter(torch.randn(rank, UNITS) * 0.3)
        self.U1, self.U2 = nn.Parameter(torch.randn(UNITS, rank) * 0.3), nn.Parameter(torch.randn(rank, UNITS) * 0.3)
        self.bias_gate, self.bias_update = nn.Parameter(torch.ones(1, UNITS)), nn.Parameter(torch.ones(1, UNITS))
        self.zeta, self.nu = nn.Parameter(torch.ones(1, 1)), nn.Parameter(-4 * torch.ones(1, 1))

    def forward(self, x):
        hiddenState = torch.zeros([x.shape[0], UNITS], dtype=x.dtype)
        hiddenStates = torch.zeros([x.shape[0], x.shape[1], UNITS], dtype=x.dtype)
        for i in range(0, x.shape[1]):
            pre = torch.matmul(torch.matmul(x[:, i], self.W1), self.W2)
            pre = pre + torch.matmul(torch.matmul(hiddenState, self.U1), self.U2)
            z = torch.sigmoid(pre + self.bias_gate)
            c = torch.tanh(pre + self.bias_update)
            hiddenState = z * hiddenState + (torch.sigmoid(self.zeta) * (1.0 - z) + torch.sigmoid(self.nu)) * c
            hiddenStates[:, i, :] = hiddenState
        return hiddenStates


@case(series())
class UnitaryRNN(nn.Module):
    """A rotation by pairs and modReLU, real numbers throughout."""

    def __init__(self):
        super().__init__()
        self.theta = nn.Parameter(torch.rand(UNITS // 2) * math.pi)
        self.perm = torch.randperm(UNITS)
        self.b = nn.Parameter(torch.zeros(UNITS // 2))
        self.inp = nn.Linear(FEATURES, UNITS)

    def forward(self, x):
        h = x.new_zeros(x.size(0), UNITS)
        cos, sin = torch.cos(self.theta), torch.sin(self.theta)
        for x_t in self.inp(x).unbind(dim=1):
            a, b = h[:, self.perm].chunk(2, dim=-1)
            a, b = a * cos - b * sin + x_t[:, ::2], a * sin + b * cos + x_t[:, 1::2]
            norm = torch.sqrt(a * a + b * b + 1e-6)
            scale = F.relu(norm + self.b) / norm
            h = torch.cat([a * scale, b * scale], dim=-1)
        return h


@case(series())
class CoupledOscillators(nn.Module):
    """coRNN: positions and velocities of driven oscillators."""

    def __init__(self, dt=0.1, gamma=1.5, epsilon=2.0):
        super().__init__()
        self.dt, self.gamma, self.epsilon = dt, gamma, epsilon
        self.i2h = nn.Linear(FEATURES + 2 * UNITS, UNITS)
        self.readout = nn.Linear(UNITS, 2)

    def forward(self, x):
        hy = torch.zeros(x.size(0), UNITS).to(x)
        hz = torch.zeros(x.size(0), UNITS).to(x)
        for t in range(x.size(1)):
            drive = torch.tanh(self.i2h(torch.cat((x[:, t], hz, hy), 1)))
            hz = hz + self.dt * (drive - self.gamma * hy - self.epsilon * hz)
            hy = hy + self.dt * hz
        return self.readout(hy)


@case(series())
class UpdateGateRNN(nn.Module):
    """One fused product for gate and candidate, written into a tensor made by empty."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(2 * UNITS, FEATURES + UNITS) * 0.2)
        self.bias = nn.Parameter(torch.zeros(2 * UNITS))

    def forward(self, x):
        batch, time, _ = x.shape
        y = torch.empty(batch, time, UNITS, dtype=x.dtype, device=x.device)
        h = torch.zeros(batch, UNITS, dtype=x.dtype, device=x.device)
        for t in range(time):
            c, g = F.linear(torch.cat((x[:, t, :], h), 1), self.weight, self.bias).split([UNITS, UNITS], 1)
            g = torch.sigmoid(g + 1.0)
            h = g * h + (1 - g) * torch.tanh(c)
            y[:, t, :] = h
        return y
