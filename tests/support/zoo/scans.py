"""Linear recurrences: some in a loop, some in one sweep over all steps in which no step can be seen."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .case import BATCH, FEATURES, UNITS, Family, expected, series, zeros
from .cells import NO_ARGUMENT

case = Family()

OWN_ZEROS = {"inputs": series, "carriable": True, "own_start": "zeros", "resume": NO_ARGUMENT}


class SRU(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.W = nn.Linear(FEATURES, 3 * FEATURES)
        self.v = nn.Parameter(torch.randn(2, FEATURES))

    def forward(self, x: Tensor, c0: Tensor | None = None) -> tuple[Tensor, Tensor]:
        u, f_in, r_in = self.W(x).chunk(3, -1)
        c = torch.zeros_like(x[0]) if c0 is None else c0
        hs = []
        for t in range(x.size(0)):
            f = torch.sigmoid(f_in[t] + self.v[0] * c)
            r = torch.sigmoid(r_in[t] + self.v[1] * c)
            c = f * c + (1 - f) * u[t]
            hs.append(r * c + (1 - r) * x[t])
        return torch.stack(hs), c


@case(
    SRU,
    expected("loop layer", "", c=0),
    style="SRU: time first, products taken out of the loop, a highway around it.",
    inputs=lambda: ((series()[0][0].transpose(0, 1).contiguous(),), {}),
    carriable=True,
    time_axis=0,
    own_start="zeros",
    resume=lambda model, states, x: model(x, states[0]["c"]),
    join=(0, "last"),
)
def sru(model, x, start):
    run, hs = start(c=zeros(BATCH, FEATURES)), []
    for t in range(x.shape[0]):
        u, f, r = model.W(x[t]).split(FEATURES, dim=1)
        f, r = (f + model.v[0] * run["c"]).sigmoid(), (r + model.v[1] * run["c"]).sigmoid()
        run.keep(c=f * run["c"] + (1 - f) * u)
        hs.append(r * run["c"] + (1 - r) * x[t])
    return torch.stack(hs), run["c"]


class QRNN(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(FEATURES, 3 * UNITS, 2)

    def forward(self, x: Tensor) -> Tensor:
        z, f, o = self.conv(F.pad(x.transpose(1, 2), (1, 0))).chunk(3, 1)
        z, f, o = z.tanh(), f.sigmoid(), o.sigmoid()
        c, h = None, []
        for z_t, f_t, o_t in zip(z.unbind(2), f.unbind(2), o.unbind(2), strict=True):
            c = (1 - f_t) * z_t if c is None else f_t * c + (1 - f_t) * z_t
            h.append(o_t * c)
        return torch.stack(h, 1)


@case(
    QRNN,
    expected("loop layer", "", c=0),
    style="Quasi-RNN: gates by a causal convolution of width two, then pooling; the convolution looks across the cut.",
    **(OWN_ZEROS | {"carriable": False, "own_start": None, "resume": "the convolution looks across the cut"}),
)
def qrnn(model, x, start):
    run, h = start(c=None), []
    for t in range(x.shape[1]):
        before = x[:, t - 1] if t else zeros(BATCH, FEATURES)
        z, f, o = (
            before @ model.conv.weight[..., 0].T + x[:, t] @ model.conv.weight[..., 1].T + model.conv.bias
        ).chunk(3, 1)
        old = zeros() if run["c"] is None else run["c"]
        run.keep(c=f.sigmoid() * old + (1 - f.sigmoid()) * z.tanh())
        h.append(o.sigmoid() * run["c"])
    return torch.stack(h, 1)


class MinGRU(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.to_hidden_and_gate = nn.Linear(FEATURES, 2 * UNITS, bias=False)

    def forward(self, x: Tensor, prev_hidden: Tensor | None = None) -> tuple[Tensor, Tensor]:
        hidden, gate = self.to_hidden_and_gate(x).chunk(2, -1)
        log_a, log_b = -F.softplus(gate), -F.softplus(-gate) + torch.log(F.softplus(hidden) + 0.5)
        if prev_hidden is not None:
            log_a, log_b = F.pad(log_a, (0, 0, 1, 0)), torch.cat([prev_hidden.log(), log_b], 1)
        a_star = log_a.cumsum(1)
        out = (a_star + (log_b - a_star).logcumsumexp(1)).exp()[:, -x.shape[1] :]
        return out, out[:, -1:]


@case(
    MinGRU,
    expected("layer", "", prev_hidden=0),
    style="MinGRU as a parallel scan in log space: no loop anywhere, the state is an optional argument and a result.",
    inputs=series,
    carriable=True,
    own_start=None,
    resume=lambda model, states, x: model(x, states[0]["prev_hidden"]),
    join=(1, "last"),
)
def min_gru_parallel(model, x, start):
    run = start(prev_hidden=None)
    for t in range(x.shape[1]):
        hidden, gate = model.to_hidden_and_gate(x[:, t : t + 1]).chunk(2, -1)
        old = zeros(BATCH, 1, UNITS) if run["prev_hidden"] is None else run["prev_hidden"]
        z = gate.sigmoid()
        run.keep(prev_hidden=(1 - z) * old + z * (F.softplus(hidden) + 0.5))
    return torch.cat(run.parts["prev_hidden"][1:], 1), run["prev_hidden"]


class MinimalMamba(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1d = nn.Conv1d(FEATURES, FEATURES, 3, groups=FEATURES, padding=2)
        self.x_proj, self.dt_proj = nn.Linear(FEATURES, 1 + 2 * 2, bias=False), nn.Linear(1, FEATURES)
        self.A_log, self.D = nn.Parameter(torch.rand(FEATURES, 2)), nn.Parameter(torch.ones(FEATURES))

    def forward(self, x: Tensor) -> Tensor:
        u = F.silu(self.conv1d(x.transpose(1, 2))[..., : x.shape[1]].transpose(1, 2))
        delta, B, C = self.x_proj(u).split([1, 2, 2], -1)
        delta = F.softplus(self.dt_proj(delta))
        return self.selective_scan(u, delta, B, C)

    def selective_scan(self, u: Tensor, delta: Tensor, B: Tensor, C: Tensor) -> Tensor:
        dA = torch.exp(torch.einsum("bld,dn->bldn", delta, -self.A_log.exp()))
        dB_u = torch.einsum("bld,bln,bld->bldn", delta, B, u)
        ssm, ys = torch.zeros(u.shape[0], FEATURES, 2), []
        for i in range(u.shape[1]):
            ssm = dA[:, i] * ssm + dB_u[:, i]
            ys.append(torch.einsum("bdn,bn->bd", ssm, C[:, i]))
        return torch.stack(ys, 1) + u * self.D


@case(
    MinimalMamba,
    expected("loop layer", "", ssm=0),
    style="Mamba-minimal: a selective scan in Python behind a short causal convolution that has no state of its own.",
    **(OWN_ZEROS | {"carriable": False, "resume": "the convolution looks across the cut"}),
)
def mamba_minimal(model, x, start):
    run, ys, padded = start(ssm=zeros(BATCH, FEATURES, 2)), [], F.pad(x, (0, 0, 2, 0))
    for t in range(x.shape[1]):
        window = (padded[:, t : t + 3] * model.conv1d.weight[:, 0].T).sum(1) + model.conv1d.bias
        u = window * window.sigmoid()
        small = model.x_proj(u)
        delta = F.softplus(model.dt_proj(small[:, :1]))[..., None]
        run.keep(ssm=(-delta * model.A_log.exp()).exp() * run["ssm"] + delta * small[:, None, 1:3] * u[..., None])
        ys.append((run["ssm"] * small[:, None, 3:]).sum(-1) + model.D * u)
    return torch.stack(ys, 1)


class RWKV(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.time_decay, self.time_first = nn.Parameter(torch.rand(FEATURES)), nn.Parameter(torch.rand(FEATURES))
        self.time_mix = nn.Parameter(torch.rand(FEATURES))
        self.key, self.value = nn.Linear(FEATURES, FEATURES, bias=False), nn.Linear(FEATURES, FEATURES, bias=False)

    def forward(self, x: Tensor, state: list[Tensor] | None = None) -> tuple[Tensor, list[Tensor]]:
        if state is None:
            state = [torch.zeros(x.shape[0], FEATURES) for _ in range(3)]
            state.append(torch.full((x.shape[0], FEATURES), -1e30))
        out = []
        for t in range(x.shape[1]):
            mixed = x[:, t] * self.time_mix + state[0] * (1 - self.time_mix)
            k, v = self.key(mixed), self.value(mixed)
            last_x, aa, bb, pp = x[:, t], *state[1:]
            p = torch.maximum(pp, self.time_first + k)
            old, new = torch.exp(pp - p), torch.exp(self.time_first + k - p)
            out.append((old * aa + new * v) / (old * bb + new))
            p = torch.maximum(pp - self.time_decay, k)
            old, new = torch.exp(pp - self.time_decay - p), torch.exp(k - p)
            state = [last_x, old * aa + new * v, old * bb + new, p]
        return torch.stack(out, 1), state


@case(
    RWKV,
    expected("loop layer", "", last_x=0, aa=0, bb=0, pp=0),
    style="RWKV in Python: a list of four parts, one of which is the last input and one starts at minus infinity.",
    inputs=series,
    carriable=True,
    own_start="zeros",
    resume=lambda model, states, x: model(x, list(states[0].values())),
    join=(1, "last"),
)
def rwkv(model, x, start):
    own = {name: zeros(BATCH, FEATURES) for name in ("last_x", "aa", "bb")}
    run, out = start(**own, pp=zeros(BATCH, FEATURES) - 1e30), []
    for t in range(x.shape[1]):
        mixed = run["last_x"] + model.time_mix * (x[:, t] - run["last_x"])
        k, v, bonus, pp = mixed @ model.key.weight.T, mixed @ model.value.weight.T, model.time_first, run["pp"]
        top = torch.maximum(pp, bonus + k)
        past, now = (pp - top).exp(), (bonus + k - top).exp()
        out.append((past * run["aa"] + now * v) / (past * run["bb"] + now))
        top = torch.maximum(pp - model.time_decay, k)
        past, now = (pp - model.time_decay - top).exp(), (k - top).exp()
        run.keep(last_x=x[:, t], aa=past * run["aa"] + now * v, bb=past * run["bb"] + now, pp=top)
    return torch.stack(out, 1), list(run.after(-1).values())


class LRU(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.nu_log, self.theta = nn.Parameter(torch.rand(UNITS)), nn.Parameter(torch.rand(UNITS) * 3)
        self.B = nn.Parameter(torch.randn(UNITS, FEATURES, dtype=torch.cfloat) / 2)
        self.C = nn.Parameter(torch.randn(2, UNITS, dtype=torch.cfloat) / 2)

    def forward(self, x: Tensor) -> Tensor:
        lam = torch.polar(torch.exp(-self.nu_log.exp()), self.theta)
        a, b = lam.expand(*x.shape[:2], UNITS), x.to(self.B.dtype) @ self.B.T
        reach = 1
        while reach < x.shape[1]:  # doubling: after round k, each step knows 2 ** k steps
            back_a = F.pad(a, (0, 0, reach, 0), value=1.0)[:, : x.shape[1]]
            back_b = F.pad(b, (0, 0, reach, 0))[:, : x.shape[1]]
            a, b, reach = a * back_a, a * back_b + b, 2 * reach
        return (b @ self.C.T).real


@case(
    LRU,
    expected("layer none", "", z=0),
    style="Linear recurrent unit by a doubling scan, complex inside: no step, no state argument, so hardly to be seen.",
    # A scan that neither takes nor gives a state: the equations can be carried, the model as it stands cannot.
    **(OWN_ZEROS | {"own_start": None, "resume": "one sweep over all steps without any place for a state"}),
)
def lru_scan(model, x, start):
    lam = torch.exp(-model.nu_log.exp() + 1j * model.theta)
    run = start(z=zeros().to(torch.cfloat))
    for t in range(x.shape[1]):
        run.keep(z=lam * run["z"] + x[:, t].to(torch.cfloat) @ model.B.T)
    return (run.along("z") @ model.C.T).real


class S4Convolution(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.A, self.C = nn.Parameter(torch.rand(FEATURES, 2)), nn.Parameter(torch.randn(FEATURES, 2))

    def forward(self, x: Tensor) -> Tensor:
        steps = x.shape[1]
        kernel = torch.einsum("dn,dnl->dl", self.C, self.A[..., None] ** torch.arange(steps))
        spectrum = torch.fft.rfft(x.transpose(1, 2), n=2 * steps) * torch.fft.rfft(kernel, n=2 * steps)
        return torch.fft.irfft(spectrum, n=2 * steps)[..., :steps].transpose(1, 2)


@case(
    S4Convolution,
    expected("layer none", "", state=0),
    style="S4 in its convolutional form: a recurrence on paper, an FFT in the code.",
    **(OWN_ZEROS | {"own_start": None, "resume": "one convolution over all steps without any place for a state"}),
)
def s4_by_fft(model, x, start):
    run, ys = start(state=zeros(BATCH, FEATURES, 2)), []
    for t in range(x.shape[1]):
        run.keep(state=model.A * run["state"] + x[:, t, :, None])
        ys.append((model.C * run["state"]).sum(-1))
    return torch.stack(ys, 1)


class LMU(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.e_x, self.e_h = nn.Linear(FEATURES, 1, bias=False), nn.Linear(UNITS, 1, bias=False)
        self.kernel = nn.Linear(FEATURES + UNITS + 3, UNITS)
        self.register_buffer("A", torch.tensor([[0.6, -0.3, 0.0], [0.3, 0.6, -0.3], [0.0, 0.3, 0.6]]))
        self.register_buffer("B", torch.tensor([[0.5], [0.2], [0.1]]))

    def forward(self, x: Tensor, state: tuple | None = None) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        h, m = state or (torch.zeros(len(x), UNITS), torch.zeros(len(x), 3))
        output = []
        for t in range(x.size(1)):
            u = self.e_x(x[:, t]) + self.e_h(h)
            m = m @ self.A.T + u @ self.B.T
            h = torch.tanh(self.kernel(torch.cat([x[:, t], h, m], 1)))
            output.append(h)
        return torch.stack(output, 1), (h, m)


@case(
    LMU,
    expected("loop layer", "", h=0, m=0),
    style="Legendre memory unit, as in pytorch-lmu: a linear memory of fixed matrices beside a nonlinear state.",
    inputs=series,
    carriable=True,
    own_start="zeros",
    resume=lambda model, states, x: model(x, (states[0]["h"], states[0]["m"])),
    join=(1, "last"),
)
def lmu(model, x, start):
    run = start(h=zeros(), m=zeros(BATCH, 3))
    for t in range(x.shape[1]):
        u = x[:, t] @ model.e_x.weight[0] + run["h"] @ model.e_h.weight[0]
        m = torch.einsum("ij,bj->bi", model.A, run["m"]) + u[:, None] * model.B[:, 0]
        run.keep(h=model.kernel(torch.cat([x[:, t], run["h"], m], 1)).tanh(), m=m)
    return run.along("h"), (run["h"], run["m"])


class LinearAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(FEATURES, 6)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        q, k = F.elu(q) + 1, F.elu(k) + 1
        S, z, out = x.new_zeros(len(x), 2, 2), x.new_zeros(len(x), 2), []
        for t in range(x.shape[1]):
            S = S + k[:, t, :, None] * v[:, t, None, :]
            z = z + k[:, t]
            out.append((q[:, t, None] @ S)[:, 0] / (q[:, t] * z).sum(-1, keepdim=True))
        return torch.stack(out, 1)


@case(
    LinearAttention,
    expected("loop", "", S=0, z=0),
    style="Causal linear attention in its recurrent form: a matrix and a normalizer, both only ever added to.",
    **OWN_ZEROS,
)
def linear_attention(model, x, start):
    run, out = start(S=zeros(BATCH, 2, 2), z=zeros(BATCH, 2)), []
    for t in range(x.shape[1]):
        q, k, v = model.qkv(x[:, t]).split(2, 1)
        q, k = F.elu(q) + 1, F.elu(k) + 1
        run.keep(S=run["S"] + torch.einsum("bi,bj->bij", k, v), z=run["z"] + k)
        out.append(torch.einsum("bi,bij->bj", q, run["S"]) / torch.einsum("bi,bi->b", q, run["z"])[:, None])
    return torch.stack(out, 1)
