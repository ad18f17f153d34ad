"""Recurrences that are no networks, or hardly: filters, dynamic programs, reservoirs, differential equations."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from .case import BATCH, FEATURES, STEPS, TOKENS, UNITS, Family, drawn, expected, gru_step, series, tokens, zeros
from .cells import NO_ARGUMENT

case = Family()

OWN_ZEROS = {"inputs": series, "carriable": True, "own_start": "zeros", "resume": NO_ARGUMENT}


class Kalman(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.F, self.H = nn.Parameter(torch.eye(2) * 0.9 + 0.1), nn.Parameter(torch.randn(FEATURES, 2))
        self.log_q, self.log_r = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(FEATURES))
        self.m0, self.P0 = nn.Parameter(torch.randn(2)), nn.Parameter(torch.eye(2))

    def forward(self, z: Tensor) -> Tensor:
        m, P = self.m0.expand(z.size(0), 2), self.P0.expand(z.size(0), 2, 2)
        Q, R, out = torch.diag(self.log_q.exp()), torch.diag(self.log_r.exp()), []
        for t in range(z.size(1)):
            m, P = m @ self.F.T, self.F @ P @ self.F.T + Q
            gain = torch.linalg.solve(self.H @ P @ self.H.T + R, self.H @ P).mT
            m = m + (gain @ (z[:, t] - m @ self.H.T)[..., None])[..., 0]
            P = P - gain @ self.H @ P
            out.append(m)
        return torch.stack(out, 1)


@case(
    Kalman,
    expected("loop layer", "", m=0, P=0),
    style="A differentiable Kalman filter: mean and covariance, both from learned starts that are expanded.",
    **(OWN_ZEROS | {"own_start": "expanded"}),
    tolerance=1e-5,
)
def kalman_filter(model, z, start):
    run = start(m=model.m0.expand(BATCH, 2), P=model.P0.expand(BATCH, 2, 2))
    Q, R = torch.diag(model.log_q.exp()), torch.diag(model.log_r.exp())
    for t in range(z.shape[1]):
        m = torch.einsum("ij,bj->bi", model.F, run["m"])
        P = torch.einsum("ij,bjk,lk->bil", model.F, run["P"], model.F) + Q
        gain = (torch.linalg.inv(model.H @ P @ model.H.T + R) @ model.H @ P).mT
        m = m + torch.einsum("bij,bj->bi", gain, z[:, t] - m @ model.H.T)
        run.keep(m=m, P=P - gain @ model.H @ P)
    return run.along("m")


class HMM(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.prior, self.trans = nn.Parameter(torch.randn(UNITS)), nn.Parameter(torch.randn(UNITS, UNITS))
        self.emit = nn.Parameter(torch.randn(UNITS, TOKENS))

    def forward(self, x: Tensor) -> Tensor:
        log_A, log_B = self.trans.log_softmax(1), self.emit.log_softmax(1)
        log_alpha = self.prior.log_softmax(0) + log_B[:, x[:, 0]].T
        for t in range(1, x.shape[1]):
            log_alpha = log_B[:, x[:, t]].T + torch.logsumexp(log_alpha[:, :, None] + log_A, dim=1)
        return log_alpha.logsumexp(1)


@case(
    HMM,
    expected("loop", "", STEPS - 1, log_alpha=0),
    style="The forward algorithm of a hidden Markov model: the first symbol makes the start.",
    inputs=tokens,
    carriable=False,
    resume="a second piece would begin with the prior again, and take its first symbol as a start",
    own_start="encoder",
    join="last",
)
def hmm_forward(model, x, start):
    A, B = model.trans.softmax(1), model.emit.softmax(1)
    run = start(log_alpha=(model.prior.softmax(0) * B[:, x[:, 0]].T).log())
    for t in range(1, x.shape[1]):
        run.keep(log_alpha=((run["log_alpha"].exp() @ A) * B[:, x[:, t]].T).log())
    return run["log_alpha"].exp().sum(1).log()


class CTC(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scores = nn.Linear(FEATURES, TOKENS)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        log_probs = self.scores(x).log_softmax(-1)
        alpha = torch.full((x.shape[0], labels.shape[1] + 1), -1e4)
        alpha[:, 0] = 0
        for t in range(x.shape[1]):
            stay = alpha + log_probs[:, t, :1]
            move = alpha[:, :-1] + log_probs[:, t].gather(1, labels)
            alpha = torch.cat([stay[:, :1], torch.logaddexp(stay[:, 1:], move)], 1)
        return -alpha[:, -1]


@case(
    CTC,
    expected("loop", "", alpha=0),
    style="A dynamic program over a lattice, as transducer and CTC losses compute it.",
    inputs=lambda: ((drawn(BATCH, STEPS, FEATURES), tokens(steps=3)[0][0]), {}),
    carriable=True,
    own_start="zeros",
    resume=NO_ARGUMENT,
    join="last",
)
def ctc_lattice(model, x, labels, start):
    own = torch.full((BATCH, 4), -1e4)
    own[:, 0] = 0
    run = start(alpha=own)
    for t in range(x.shape[1]):
        logs, old, new = model.scores(x[:, t]).log_softmax(1), run["alpha"], torch.empty(BATCH, 4)
        for b in range(BATCH):
            for k in range(4):
                ways = [old[b, k] + logs[b, 0]] + ([old[b, k - 1] + logs[b, labels[b, k - 1]]] if k else [])
                new[b, k] = torch.stack(ways).logsumexp(0)
        run.keep(alpha=new)
    return -run["alpha"][:, -1]


class GRUD(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gamma_x, self.gamma_h = nn.Parameter(torch.rand(FEATURES)), nn.Linear(FEATURES, UNITS)
        self.cell = nn.GRUCell(2 * FEATURES, UNITS)
        self.register_buffer("x_mean", torch.randn(FEATURES))

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        h, x_last = torch.zeros(len(x), UNITS), torch.zeros(len(x), FEATURES)
        delta, out = torch.zeros(len(x), FEATURES), []
        for t in range(x.shape[1]):
            x_t, m = x[:, t], mask[:, t]
            x_last = torch.where(m > 0, x_t, x_last)
            decay = torch.exp(-torch.relu(self.gamma_x * delta))
            x_hat = m * x_t + (1 - m) * (decay * x_last + (1 - decay) * self.x_mean)
            h = self.cell(torch.cat([x_hat, m], 1), torch.exp(-torch.relu(self.gamma_h(delta))) * h)
            delta = torch.where(m > 0, 1.0, delta + 1)
            out.append(h)
        return torch.stack(out, 1)


@case(
    GRUD,
    expected("loop cell", "", h=0, x_last=0, delta=0),
    style="GRU-D: the last seen value and the time since then are parts of the state, though no argument names them.",
    inputs=lambda: ((drawn(BATCH, STEPS, FEATURES), (drawn(BATCH, STEPS, FEATURES, seed=5) > 0).float()), {}),
    carriable=True,
    own_start="zeros",
    resume=NO_ARGUMENT,
    cut_inputs=(0, 1),
)
def gru_d(model, x, mask, start):
    run = start(h=zeros(), x_last=zeros(BATCH, FEATURES), delta=zeros(BATCH, FEATURES))
    for t in range(x.shape[1]):
        seen = mask[:, t].bool()
        x_last = torch.where(seen, x[:, t], run["x_last"])
        keep = (-(model.gamma_x * run["delta"]).clamp(min=0)).exp()
        filled = torch.where(seen, x[:, t], keep * x_last + (1 - keep) * model.x_mean)
        h = run["h"] * (-model.gamma_h(run["delta"]).clamp(min=0)).exp()
        h = gru_step(model.cell, torch.cat([filled, mask[:, t]], 1), h)
        run.keep(h=h, x_last=x_last, delta=torch.where(seen, torch.ones(()), run["delta"] + 1))
    return run.along("h")


class Reservoir(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("W_in", torch.randn(FEATURES, UNITS))
        self.register_buffer("W_res", torch.randn(UNITS, UNITS) / 3)
        self.readout = nn.Linear(UNITS, 2)

    @torch.no_grad()
    def step(self, u: Tensor, r: Tensor) -> Tensor:
        return 0.7 * r + 0.3 * torch.tanh(u @ self.W_in + r @ self.W_res)

    def forward(self, u: Tensor) -> Tensor:
        r, states = torch.zeros(u.shape[0], UNITS), []
        for t in range(u.shape[1]):
            r = self.step(u[:, t], r)
            states.append(r)
        return self.readout(torch.stack(states, 1))


@case(
    Reservoir,
    expected("loop", "", r=0),
    style="An echo state network: fixed weights in buffers, leaky units, a trained readout, no gradient in the loop.",
    **OWN_ZEROS,
)
def echo_state(model, u, start):
    run = start(r=zeros())
    for t in range(u.shape[1]):
        drive = torch.einsum("bf,fh->bh", u[:, t], model.W_in) + torch.einsum("bh,hk->bk", run["r"], model.W_res)
        run.keep(r=run["r"] + 0.3 * (drive.tanh() - run["r"]))
    return model.readout(run.along("r"))


class ControlledODE(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.start, self.field = nn.Linear(FEATURES, UNITS), nn.Linear(UNITS, UNITS * FEATURES)

    def forward(self, x: Tensor) -> Tensor:
        z = self.start(x[:, 0])
        zs = [z]
        for t in range(x.shape[1] - 1):
            slope = torch.tanh(self.field(z)).view(-1, UNITS, FEATURES)
            z = z + torch.bmm(slope, (x[:, t + 1] - x[:, t]).unsqueeze(-1)).squeeze(-1)
            zs.append(z)
        return torch.stack(zs, 1)


@case(
    ControlledODE,
    expected("loop", "", STEPS - 1, z=0),
    style="A neural controlled differential equation by Euler steps: two neighboring inputs in each step.",
    inputs=series,
    carriable=False,
    resume="the difference across the cut belongs to no piece",
    own_start="encoder",
)
def controlled_ode(model, x, start):
    run = start(z=model.start(x[:, 0]))
    for t in range(1, x.shape[1]):
        slope = model.field(run["z"]).tanh().view(BATCH, UNITS, FEATURES)
        run.keep(z=run["z"] + torch.einsum("buf,bf->bu", slope, x[:, t] - x[:, t - 1]))
    return torch.stack(run.parts["z"], 1)


class Smoother(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.logit, self.u = nn.Parameter(torch.randn(FEATURES)), nn.Parameter(torch.randn(FEATURES))

    def forward(self, x: Tensor) -> Tensor:
        ema, out = x[:, 0], [x[:, 0]]
        for frame in x[:, 1:].unbind(1):
            ema = torch.lerp(frame, ema, torch.sigmoid(self.logit))
            out.append(torch.relu(ema * self.u + frame))
        return torch.stack(out, 1)


@case(
    Smoother,
    expected("loop", "", STEPS - 1, ema=0),
    style="A trainable exponential average, as in PCEN front ends: the first frame is the start.",
    inputs=series,
    carriable=False,
    resume="a second piece would begin with its own first frame",
    own_start="encoder",
)
def smoother(model, x, start):
    keep, run = model.logit.sigmoid(), start(ema=x[:, 0])
    out = [x[:, 0]]
    for t in range(1, x.shape[1]):
        run.keep(ema=keep * run["ema"] + (1 - keep) * x[:, t])
        out.append((run["ema"] * model.u + x[:, t]).clamp(min=0))
    return torch.stack(out, 1)


class RunningMaximum(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.score = nn.Linear(FEATURES, UNITS)

    def forward(self, x: Tensor) -> Tensor:
        best = torch.full((len(x), UNITS), -1e3)
        for frame in x.unbind(1):
            best = torch.maximum(best, self.score(frame))
        return best


@case(
    RunningMaximum,
    expected("loop none", "", best=0),
    style="Pooling written as a loop: a maximum that only the next maximum reads. A state, or a mere collection.",
    inputs=series,
    carriable=True,
    own_start="zeros",
    resume=NO_ARGUMENT,
    join="last",
)
def running_maximum(model, x, start):
    run = start(best=zeros() - 1e3)
    for t in range(x.shape[1]):
        run.keep(best=torch.stack([run["best"], model.score(x[:, t])]).max(0).values)
    return run["best"]
