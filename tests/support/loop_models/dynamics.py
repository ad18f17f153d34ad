"""Networks of neurons and flows: rate and spiking networks, reservoirs, ODE cells."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from .case import FEATURES, UNITS, Family, normal, series, time_first

case = Family("dynamics")


@case(time_first())
class CTRNN(nn.Module):
    """Continuous-time network of a neuroscience tutorial: Euler steps of dt/tau, a readout of all steps."""

    def __init__(self, dt=20, tau=100):
        super().__init__()
        self.alpha = dt / tau
        self.input2h = nn.Linear(FEATURES, UNITS)
        self.h2h = nn.Linear(UNITS, UNITS)
        self.fc = nn.Linear(UNITS, 3)

    def init_hidden(self, input_shape):
        return torch.zeros(input_shape[1], UNITS)

    def recurrence(self, input, hidden):
        pre_activation = self.input2h(input) + self.h2h(hidden)
        return hidden * (1 - self.alpha) + torch.relu(pre_activation) * self.alpha

    def forward(self, input, hidden=None):
        if hidden is None:
            hidden = self.init_hidden(input.shape).to(input.device, input.dtype)
        output = []
        for i in range(input.size(0)):
            hidden = self.recurrence(input[i], hidden)
            output.append(hidden)
        output = torch.stack(output, dim=0)
        return self.fc(output), output


class NoisyRateNetwork(nn.Module):
    """Private noise in each step while training; Dale's law by a fixed sign per unit."""

    def __init__(self, alpha=0.2, sigma_rec=0.15):
        super().__init__()
        self.alpha, self.sigma_rec = alpha, sigma_rec
        self.w_in = nn.Parameter(torch.rand(UNITS, FEATURES) * 0.3)
        self.w_rec = nn.Parameter(torch.rand(UNITS, UNITS) * 0.3)
        self.b = nn.Parameter(torch.zeros(UNITS))
        sign = torch.ones(UNITS)
        sign[-UNITS // 4 :] = -1
        self.register_buffer("dale", torch.diag(sign))
        self.register_buffer("mask", 1 - torch.eye(UNITS))

    def effective_weight(self):
        return (torch.abs(self.w_rec) * self.mask) @ self.dale

    def forward(self, u):
        x = u.new_zeros(u.shape[0], UNITS)
        r = torch.relu(x)
        rates = []
        for t in range(u.shape[1]):
            x = (1 - self.alpha) * x + self.alpha * (r @ self.effective_weight().T + u[:, t] @ self.w_in.T + self.b)
            if self.training:
                x = x + self.sigma_rec * (2 * self.alpha) ** 0.5 * torch.randn_like(x)
            r = torch.relu(x)
            rates.append(r)
        return torch.stack(rates, 1)


# Random numbers of another width are other numbers: these cannot be compared in float64.
case(series(), name="noisy_rate_network", doubles=False)(NoisyRateNetwork)
case(series(), name="noisy_rate_network_at_rest", builder=lambda: NoisyRateNetwork().eval())(NoisyRateNetwork)


@case(series(), doubles=False)
class LowRankRNN(nn.Module):
    """Connectivity m n^T / N; the noise of all steps is drawn at once, the trajectory holds the start too."""

    def __init__(self, rank=2, noise_std=0.05, alpha=0.2):
        super().__init__()
        self.noise_std, self.alpha = noise_std, alpha
        self.wi = nn.Parameter(torch.randn(FEATURES, UNITS))
        self.m, self.n = nn.Parameter(torch.randn(UNITS, rank)), nn.Parameter(torch.randn(UNITS, rank))
        self.wo = nn.Parameter(torch.randn(UNITS, 1))
        self.h0 = nn.Parameter(torch.zeros(UNITS))

    def forward(self, input):
        batch_size, seq_len = input.shape[0], input.shape[1]
        h = self.h0.clone()
        r = torch.tanh(h)
        noise = torch.randn(batch_size, seq_len, UNITS)
        output = torch.zeros(batch_size, seq_len, 1)
        trajectories = torch.zeros(batch_size, seq_len + 1, UNITS)
        trajectories[:, 0, :] = h
        for i in range(seq_len):
            h = (
                h
                + self.noise_std * noise[:, i, :]
                + self.alpha * (-h + r.matmul(self.n).matmul(self.m.t()) / UNITS + input[:, i, :].matmul(self.wi))
            )
            r = torch.tanh(h)
            output[:, i, :] = r.matmul(self.wo) / UNITS
            trajectories[:, i + 1, :] = h
        return output, trajectories


@case(series())
class ShortTermPlasticity(nn.Module):
    """Facilitation and depression of synapses beside the rates: three states of one width."""

    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.randn(UNITS, UNITS) * 0.2)
        self.inp = nn.Linear(FEATURES, UNITS)
        self.register_buffer("tau_x", torch.linspace(0.05, 0.2, UNITS))
        self.register_buffer("tau_u", torch.linspace(0.2, 0.05, UNITS))
        self.U = 0.45

    def forward(self, stim):
        B = stim.size(0)
        h = torch.zeros(B, UNITS, dtype=stim.dtype)
        syn_x = torch.ones(B, UNITS, dtype=stim.dtype)
        syn_u = torch.full((B, UNITS), self.U, dtype=stim.dtype)
        h_hist, x_hist = [], []
        for x in stim.unbind(1):
            syn_x = torch.clamp(syn_x + self.tau_x * (1 - syn_x) - 0.1 * syn_u * syn_x * h, min=0.0, max=1.0)
            syn_u = torch.clamp(syn_u + self.tau_u * (self.U - syn_u) + 0.1 * self.U * (1 - syn_u) * h, 0.0, 1.0)
            h_post = syn_u * syn_x * h
            h = torch.relu(h * 0.8 + 0.2 * (self.inp(x) + h_post @ self.w))
            h_hist.append(h)
            x_hist.append(syn_x)
        return torch.stack(h_hist, 1), torch.stack(x_hist, 1)


@case(series())
class LiquidTimeConstant(nn.Module):
    """LTC: a fused solver of several unfolds within each step, sensory and recurrent synapses as sums."""

    def __init__(self, unfolds=3):
        super().__init__()
        self.unfolds = unfolds
        self.gleak, self.vleak = nn.Parameter(torch.rand(UNITS)), nn.Parameter(torch.randn(UNITS) * 0.1)
        self.cm = nn.Parameter(torch.rand(UNITS) + 0.4)
        self.sigma, self.mu = nn.Parameter(torch.rand(UNITS, UNITS) + 3), nn.Parameter(torch.rand(UNITS, UNITS))
        self.w, self.erev = nn.Parameter(torch.rand(UNITS, UNITS)), nn.Parameter(torch.randn(UNITS, UNITS).sign())
        self.sensory = nn.Linear(FEATURES, UNITS)

    def _ode_solver(self, inputs, state):
        v_pre, drive = state, self.sensory(inputs)
        cm_t = F.softplus(self.cm) * self.unfolds
        for _ in range(self.unfolds):
            act = F.softplus(self.w) * torch.sigmoid(self.sigma * (v_pre.unsqueeze(-1) - self.mu))
            num = torch.sum(act * self.erev, dim=1) + drive
            den = torch.sum(act, dim=1)
            v_pre = (cm_t * v_pre + self.gleak * self.vleak + num) / (cm_t + self.gleak + den + 1e-8)
        return v_pre

    def forward(self, x):
        state = torch.zeros(x.size(0), UNITS, dtype=x.dtype)
        outs = []
        for t in range(x.size(1)):
            state = self._ode_solver(x[:, t], state)
            outs.append(state)
        return torch.stack(outs, 1)


def _with_gaps_of_time(batch, steps):
    return normal(batch, steps, FEATURES), normal(batch, steps, salt=1).abs()


@case(_with_gaps_of_time)
class ClosedFormContinuous(nn.Module):
    """CfC: two heads mixed by a sigmoid of the elapsed time."""

    def __init__(self):
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(FEATURES + UNITS, 16), nn.SiLU())
        self.ff1, self.ff2 = nn.Linear(16, UNITS), nn.Linear(16, UNITS)
        self.time_a, self.time_b = nn.Linear(16, UNITS), nn.Linear(16, UNITS)

    def forward(self, x, timespans):
        h = torch.zeros((x.size(0), UNITS), dtype=x.dtype)
        for t in range(x.size(1)):
            inputs, ts = x[:, t], timespans[:, t].view(-1, 1)
            z = self.backbone(torch.cat([inputs, h], 1))
            interp = torch.sigmoid(self.time_a(z) * ts + self.time_b(z))
            h = torch.tanh(self.ff1(z)) * (1.0 - interp) + interp * torch.tanh(self.ff2(z))
        return h


@case(_with_gaps_of_time)
class ODERNN(nn.Module):
    """The state flows between observations, by RK4 over each row's own gap, and jumps at them."""

    def __init__(self):
        super().__init__()
        self.f = nn.Sequential(nn.Linear(UNITS, 16), nn.Tanh(), nn.Linear(16, UNITS))
        self.jump = nn.GRUCell(FEATURES, UNITS)

    def flow(self, h, dt):
        k1 = self.f(h)
        k2 = self.f(h + dt / 2 * k1)
        k3 = self.f(h + dt / 2 * k2)
        k4 = self.f(h + dt * k3)
        return h + dt / 6 * (k1 + 2 * k2 + 2 * k3 + k4)

    def forward(self, x, gaps):
        h = x.new_zeros(len(x), UNITS)
        before, after = [], []
        for obs, dt in zip(x.unbind(1), gaps.unbind(1), strict=True):
            h = self.flow(h, dt[:, None])
            before.append(h)
            h = self.jump(obs, h)
            after.append(h)
        return torch.stack(before, 1), torch.stack(after, 1)


@case(series())
class EchoState(nn.Module):
    """A reservoir of fixed buffers with leak; only the readout learns."""

    def __init__(self, leak=0.3, rho=0.9):
        super().__init__()
        w = torch.randn(UNITS, UNITS)
        w = w * (torch.rand(UNITS, UNITS) < 0.5)
        self.register_buffer("w_in", torch.rand(FEATURES, UNITS) - 0.5)
        self.register_buffer("w", w * (rho / torch.linalg.eigvals(w).abs().max()))
        self.readout = nn.Linear(UNITS + FEATURES, 2)
        self.leak = leak

    def forward(self, u):
        state = u.new_zeros(u.size(0), UNITS)
        states = u.new_zeros(u.size(0), u.size(1), UNITS)
        for t in range(u.size(1)):
            pre = torch.tanh(u[:, t] @ self.w_in + state @ self.w)
            state = torch.lerp(state, pre, self.leak)
            states[:, t] = state
        return self.readout(torch.cat([states, u], -1))


class FastSigmoid(torch.autograd.Function):
    """A step forwards, the slope of a fast sigmoid backwards."""

    @staticmethod
    def forward(ctx: Any, mem: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(mem)
        return (mem > 0).to(mem.dtype)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        (mem,) = ctx.saved_tensors
        return grad / (25.0 * mem.abs() + 1.0) ** 2


@case(series())
class SpikingNet(nn.Module):
    """Two layers of leaky integrate-and-fire units; spikes and voltages recorded in lists, as in snn tutorials."""

    def __init__(self, beta=0.9):
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(FEATURES, UNITS), nn.Linear(UNITS, 4)
        self.beta = beta

    def lif(self, cur, mem):
        reset = FastSigmoid.apply(mem - 1.0).detach()
        mem = self.beta * mem + cur - reset * 1.0
        return FastSigmoid.apply(mem - 1.0), mem

    def forward(self, x):
        mem1 = torch.zeros(x.size(0), UNITS, dtype=x.dtype)
        mem2 = torch.zeros(x.size(0), 4, dtype=x.dtype)
        spk2_rec, mem2_rec = [], []
        for step in range(x.size(1)):
            spk1, mem1 = self.lif(self.fc1(3 * x[:, step]), mem1)
            spk2, mem2 = self.lif(self.fc2(spk1), mem2)
            spk2_rec.append(spk2)
            mem2_rec.append(mem2)
        return torch.stack(spk2_rec, dim=0), torch.stack(mem2_rec, dim=0)


@case(series())
class AdaptiveSpikingRNN(nn.Module):
    """LSNN: thresholds that rise with each spike, recurrent weights without self-connections, spike counts out."""

    def __init__(self):
        super().__init__()
        self.w_in, self.w_rec = nn.Linear(FEATURES, UNITS, False), nn.Linear(UNITS, UNITS, False)
        self.out = nn.Linear(UNITS, 3)
        self.register_buffer("no_self", 1.0 - torch.eye(UNITS))

    def forward(self, x):
        v = b = z = x.new_zeros(x.shape[0], UNITS)
        count = 0
        readout = x.new_zeros(x.shape[0], 3)
        for x_t in x.transpose(0, 1):
            i_t = self.w_in(5 * x_t) + F.linear(z, self.w_rec.weight * self.no_self)
            b = 0.97 * b + 0.03 * z
            theta = 0.5 + 1.6 * b
            v = 0.9 * v * (1 - z.detach()) + i_t
            z = FastSigmoid.apply((v - theta) / theta)
            readout = 0.8 * readout + self.out(z)
            count = count + z
        return readout, count


@case(series())
class WilsonCowan(nn.Module):
    """Excitatory and inhibitory populations that drive each other, several Euler steps per input."""

    def __init__(self, substeps=2):
        super().__init__()
        self.wee, self.wei = nn.Parameter(torch.rand(UNITS, UNITS) / UNITS), nn.Parameter(torch.rand(UNITS, 4) / 4)
        self.wie, self.wii = nn.Parameter(torch.rand(4, UNITS) / UNITS), nn.Parameter(torch.rand(4, 4) / 4)
        self.stim = nn.Linear(FEATURES, UNITS)
        self.log_tau = nn.Parameter(torch.zeros(2))
        self.substeps = substeps

    def forward(self, x):
        E, I = x.new_full((x.size(0), UNITS), 0.1), x.new_full((x.size(0), 4), 0.1)  # noqa: E741
        tau_e, tau_i = torch.exp(self.log_tau) * 10
        trace = []
        for P in self.stim(x).unbind(1):
            for _ in range(self.substeps):
                dE = (-E + (1 - E) * torch.sigmoid(E @ self.wee.T - I @ self.wei.T + P)) / tau_e
                dI = (-I + (1 - I) * torch.sigmoid(E @ self.wie.T - I @ self.wii.T)) / tau_i
                E, I = E + dE, I + dI  # noqa: E741
            trace.append(torch.cat([E, I], -1))
        return torch.stack(trace, 1)
