"""States of every make: dicts, named tuples, dataclasses, complex, integer, boolean, growing, shared by all rows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .case import BATCH, FEATURES, UNITS, Family, expected, gru_step, lstm_step, rnn_step, series, tokens, zeros
from .cells import NO_ARGUMENT

case = Family()


class DictCell(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fast, self.slow = nn.GRUCell(FEATURES + 2, UNITS), nn.Linear(UNITS, 2)

    def forward(self, x: Tensor, carry: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        fast = self.fast(torch.cat([x, carry["slow"]], 1), carry["fast"])
        return fast.sum(1), {"fast": fast, "slow": 0.9 * carry["slow"] + 0.1 * self.slow(fast)}


class DictState(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.step = DictCell()

    def forward(self, *, x: Tensor, carry: dict[str, Tensor] | None = None) -> dict[str, object]:
        if carry is None:
            carry = {"fast": x.new_zeros(len(x), UNITS), "slow": x.new_zeros(len(x), 2)}
        ys = []
        for t in range(x.shape[1]):
            y, carry = self.step(x[:, t], carry)
            ys.append(y)
        return {"y": torch.stack(ys, 1), "carry": carry}


@case(
    DictState,
    expected("cell loop", "step", track="step", fast=0, slow=0),
    style="A dict as state, in a model that takes keywords only and returns a dict, in the manner of flax ports.",
    inputs=lambda: ((), {"x": series()[0][0]}),
    carriable=True,
    own_start="zeros",
    resume=lambda model, states, x: model(x=x, carry=states[0]),
    cut_inputs=("x",),
    join={"y": 1, "carry": "last"},
)
def dict_state(model, x, start):
    cell, run, ys = model.step, start(fast=zeros(), slow=zeros(BATCH, 2)), []
    for t in range(x.shape[1]):
        fast = gru_step(cell.fast, torch.cat([x[:, t], run["slow"]], 1), run["fast"])
        run.keep(fast=fast, slow=0.9 * run["slow"] + 0.1 * cell.slow(fast))
        ys.append(fast.sum(1))
    return {"y": torch.stack(ys, 1), "carry": run.after(-1)}


class Memory(NamedTuple):
    v: Tensor
    i: Tensor


class CurrentNeuron(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w, self.rec = nn.Linear(FEATURES, UNITS), nn.Linear(UNITS, UNITS, bias=False)

    def forward(self, x: Tensor, state: Memory) -> tuple[Tensor, Memory]:
        v = state.v + 0.3 * (state.i - state.v)
        z = torch.sigmoid(5 * (v - 0.2))
        return z, Memory(v=(1 - z) * v, i=0.8 * state.i + self.w(x) + self.rec(z))


class Neurons(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lif = CurrentNeuron()

    def forward(self, x: Tensor, s: Memory | None = None) -> tuple[Tensor, Memory]:
        s = s if s is not None else Memory(torch.zeros(len(x), UNITS), torch.zeros(len(x), UNITS))
        zs = []
        for frame in x.unbind(1):
            z, s = self.lif(frame, s)
            zs.append(z)
        return torch.stack(zs, 1), s


@case(
    Neurons,
    expected("cell loop", "lif", track="lif", v=0, i=0),
    style="Norse: a named tuple of voltage and current.",
    inputs=series,
    carriable=True,
    own_start="zeros",
    resume=lambda model, states, x: model(x, Memory(**states[0])),
    join=(1, "last"),
)
def named_tuple_state(model, x, start):
    cell, run, zs = model.lif, start(v=zeros(), i=zeros()), []
    for t in range(x.shape[1]):
        v = 0.7 * run["v"] + 0.3 * run["i"]
        z = torch.sigmoid(5 * v - 1)
        run.keep(v=v - z * v, i=0.8 * run["i"] + cell.w(x[:, t]) + z @ cell.rec.weight.T)
        zs.append(z)
    return torch.stack(zs, 1), (run["v"], run["i"])


@dataclass
class Belief:
    mean: Tensor
    log_var: Tensor


class Believing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.update = nn.Linear(FEATURES + 4, 4)

    def forward(self, x: Tensor) -> Tensor:
        z = Belief(mean=torch.zeros(len(x), 2), log_var=torch.full((len(x), 2), -1.0))
        means = []
        for obs in iter(x.unbind(1)):
            gain, grow = self.update(torch.cat([obs, z.mean, z.log_var], 1)).tanh().chunk(2, 1)
            z = Belief(mean=z.mean + gain * z.log_var.exp(), log_var=0.9 * z.log_var + grow)
            means.append(z.mean)
        return torch.stack(means, 1)


@case(
    Believing,
    expected("loop", "", mean=0, log_var=0),
    style="A dataclass as state, made anew at each step of a loop without a cell.",
    inputs=series,
    carriable=True,
    own_start="zeros",
    resume=NO_ARGUMENT,
)
def dataclass_state(model, x, start):
    run = start(mean=zeros(BATCH, 2), log_var=zeros(BATCH, 2) - 1)
    for t in range(x.shape[1]):
        change = model.update(torch.cat([x[:, t], run["mean"], run["log_var"]], 1)).tanh()
        run.keep(mean=run["mean"] + change[:, :2] * run["log_var"].exp(), log_var=0.9 * run["log_var"] + change[:, 2:])
    return run.along("mean")


class Nested(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.low, self.high = nn.LSTMCell(FEATURES, UNITS), nn.GRUCell(UNITS, 2)

    def forward(self, x: Tensor, memory: dict | None = None) -> tuple[Tensor, dict]:
        if memory is None:
            memory = {"stack": [(torch.zeros(len(x), UNITS), torch.zeros(len(x), UNITS)), torch.zeros(len(x), 2)]}
        ys = []
        for t in range(x.shape[1]):
            (h, c), top = memory["stack"]
            h, c = self.low(x[:, t], (h, c))
            top = self.high(h, top)
            memory = {"stack": [(h, c), top]}
            ys.append(top)
        return torch.stack(ys, 1), memory


@case(
    Nested,
    expected("cell loop", "low", track="low", h=0, c=0),
    expected("cell loop", "high", track="high", top=0),
    style="A tuple in a list in a dict: the state of two cells, handed around as one thing.",
    inputs=series,
    carriable=True,
    own_start="zeros",
    resume=lambda model, s, x: model(x, {"stack": [(s[0]["h"], s[0]["c"]), s[1]["top"]]}),
    join=(1, "last"),
)
def nested_state(model, x, start):
    low, high = start(h=zeros(), c=zeros()), start(top=zeros(BATCH, 2))
    for t in range(x.shape[1]):
        h, c = lstm_step(model.low, x[:, t], low["h"], low["c"])
        low.keep(h=h, c=c)
        high.keep(top=gru_step(model.high, h, high["top"]))
    return high.along("top"), {"stack": [(low["h"], low["c"]), high["top"]]}


class Unitary(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.phase = nn.Parameter(torch.rand(UNITS) * 6)
        self.inner, self.out = nn.Linear(FEATURES, UNITS), nn.Linear(2 * UNITS, 2)

    def forward(self, x: Tensor) -> Tensor:
        z = torch.zeros(len(x), UNITS, dtype=torch.cfloat)
        turn = torch.polar(torch.full_like(self.phase, 0.95), self.phase)
        out = []
        for u in self.inner(x).unbind(1):
            z = torch.fft.fft(z * turn, norm="ortho") + u
            out.append(self.out(torch.view_as_real(z).flatten(1)))
        return torch.stack(out, 1)


@case(
    Unitary,
    expected("loop", "", z=0),
    style="A unitary RNN: the state is complex and turned by an FFT at each step.",
    inputs=series,
    carriable=True,
    own_start="zeros",
    resume=NO_ARGUMENT,
)
def complex_state(model, x, start):
    n = torch.arange(UNITS)
    fourier = torch.exp(-2j * torch.pi * n[:, None] * n / UNITS) / UNITS**0.5
    run, out = start(z=zeros().to(torch.cfloat)), []
    for t in range(x.shape[1]):
        turned = run["z"] * 0.95 * (model.phase.cos() + 1j * model.phase.sin())
        run.keep(z=turned @ fourier.to(torch.cfloat) + model.inner(x[:, t]))
        out.append(model.out(torch.stack([run["z"].real, run["z"].imag], -1).flatten(1)))
    return torch.stack(out, 1)


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.RNNCell(FEATURES, UNITS)

    def forward(self, x: Tensor) -> Tensor:
        h, seen = torch.zeros(len(x), UNITS), torch.zeros(len(x), dtype=torch.long)
        alive, out = torch.ones(len(x), dtype=torch.bool), []
        for t in range(x.shape[1]):
            h = self.rnn(x[:, t], h)
            seen = seen + (h[:, 0] > 0).long()
            alive = alive & (h[:, 1] < 0.9)
            out.append(h * alive[:, None] / (1 + seen)[:, None])
        return torch.stack(out, 1)


@case(
    Counting,
    expected("loop cell", "", h=0, seen=0, alive=0),
    style="Floats beside an integer count and a boolean mask, as adaptive halting keeps them.",
    inputs=series,
    carriable=True,
    own_start="zeros",
    resume=NO_ARGUMENT,
)
def integer_and_boolean_parts(model, x, start):
    own = {"seen": torch.zeros(BATCH, dtype=torch.long), "alive": torch.ones(BATCH, dtype=torch.bool)}
    run, out = start(h=zeros(), **own), []
    for t in range(x.shape[1]):
        h = rnn_step(model.rnn, x[:, t], run["h"])
        run.keep(h=h, seen=run["seen"] + (h[:, 0] > 0), alive=run["alive"] & (h[:, 1] < 0.9))
        out.append(h * run["alive"].float()[:, None] / (1 + run["seen"].float())[:, None])
    return torch.stack(out, 1)


class Gain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.RNNCell(FEATURES, UNITS)

    def forward(self, x: Tensor) -> Tensor:
        h, gain, out = x.new_zeros(x.size(0), UNITS), torch.tensor(1.0), []
        for frame in x.unbind(1):
            h = self.cell(frame * gain, h)
            gain = 0.9 * gain + 0.1 * h.abs().mean()
            out.append(h)
        return torch.stack(out, 1)


@case(
    Gain,
    expected("loop cell", "", h=0, gain=None),
    style="Automatic gain: one number of no dimension, shared by all rows, goes along with the state.",
    inputs=series,
    carriable=True,
    own_start="zeros",
    resume=NO_ARGUMENT,
)
def zero_dim_part(model, x, start):
    run = start(h=zeros(), gain=torch.tensor(1.0))
    for t in range(x.shape[1]):
        h = rnn_step(model.cell, x[:, t] * run["gain"], run["h"])
        run.keep(h=h, gain=0.9 * run["gain"] + 0.1 * h.abs().mean())
    return run.along("h")


class Remembering(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell, self.query = nn.GRUCell(FEATURES + UNITS, UNITS), nn.Linear(UNITS, UNITS)

    def forward(self, x: Tensor) -> Tensor:
        h, past, out = torch.zeros(x.shape[0], UNITS), torch.zeros(0), []
        for t in range(x.shape[1]):
            read = torch.zeros_like(h)
            if past.numel():
                weights = torch.softmax(torch.einsum("bh,bth->bt", self.query(h), past), 1)
                read = torch.einsum("bt,bth->bh", weights, past)
            h = self.cell(torch.cat([x[:, t], read], 1), h)
            past = torch.cat([past, h[:, None]], 1) if past.numel() else h[:, None]
            out.append(h)
        return torch.stack(out, 1)


@case(
    Remembering,
    expected("loop cell cache", "", derived=("h",), h=0, past=0),
    style="A network that attends to its own past states: empty at first, one row longer after each step.",
    inputs=series,
    carriable=True,
    own_start="zeros",
    resume=NO_ARGUMENT,
)
def growing_memory(model, x, start):
    run = start(h=zeros(), past=torch.zeros(BATCH, 0, UNITS))
    for t in range(x.shape[1]):
        weights = torch.stack([(model.query(run["h"]) * old).sum(1) for old in run["past"].unbind(1)] or [zeros(BATCH)])
        read = sum((w[:, None] * old for w, old in zip(weights.softmax(0), run["past"].unbind(1), strict=False)), 0.0)
        h = gru_step(model.cell, torch.cat([x[:, t], read + zeros()], 1), run["h"])
        run.keep(h=h, past=torch.cat([run["past"], h[:, None]], 1))
    return run.along("h")


class FastWeights(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.kvq, self.rate = nn.Linear(FEATURES, 9), nn.Linear(FEATURES, 1)

    def forward(self, x: Tensor, state: Tensor | None = None) -> tuple[Tensor, Tensor]:
        outs = []
        for frame in x.unbind(1):
            k, v, q = self.kvq(frame).chunk(3, -1)
            k = F.softmax(k, -1)
            write = torch.sigmoid(self.rate(frame)) * (v if state is None else v - (state @ k[..., None])[..., 0])
            fresh = write[..., None] * k[:, None]
            state = fresh if state is None else state + fresh
            outs.append((state @ q[..., None])[..., 0])
        return torch.stack(outs, 1), state


@case(
    FastWeights,
    expected("loop", "", state=0),
    style="Fast weights by the delta rule: a matrix for each row, None until the first step has made it.",
    inputs=series,
    carriable=True,
    own_start=None,
    resume=lambda model, states, x: model(x, states[0]["state"]),
    join=(1, "last"),
)
def none_at_first(model, x, start):
    run, outs = start(state=None), []
    for t in range(x.shape[1]):
        old = zeros(BATCH, 3, 3) if run["state"] is None else run["state"]
        k, v, q = model.kvq(x[:, t]).split(3, 1)
        k = k.softmax(1)
        write = model.rate(x[:, t]).sigmoid() * (v - torch.einsum("bij,bj->bi", old, k))
        run.keep(state=old + torch.einsum("bi,bj->bij", write, k))
        outs.append(torch.einsum("bij,bj->bi", run["state"], q))
    return torch.stack(outs, 1), run["state"]


class InPlace(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, FEATURES)
        self.cells = nn.ModuleList([nn.RNNCell(FEATURES, UNITS), nn.RNNCell(UNITS, UNITS)])

    def forward(self, ids: Tensor) -> Tensor:
        hidden = torch.zeros(2, ids.shape[0], UNITS)
        for t in range(ids.shape[1]):
            frame = self.embed(ids[:, t])
            for k, cell in enumerate(self.cells):
                hidden[k] = frame = cell(frame, hidden[k].clone())
        return hidden[-1]


@case(
    InPlace,
    expected("cell loop", "cells.0", track="cells.0", h=0),
    expected("cell loop", "cells.1", track="cells.1", h=0),
    style="One tensor (layers, batch, unit) made before the loop and written in place, layer by layer.",
    inputs=tokens,
    carriable=True,
    own_start="zeros",
    resume=NO_ARGUMENT,
    join="last",
)
def written_in_place(model, ids, start):
    low, high = start(h=zeros()), start(h=zeros())
    for t in range(ids.shape[1]):
        low.keep(h=rnn_step(model.cells[0], model.embed.weight[ids[:, t]], low["h"]))
        high.keep(h=rnn_step(model.cells[1], low["h"], high["h"]))
    return high["h"]
