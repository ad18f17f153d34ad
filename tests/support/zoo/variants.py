"""Cells of articles (peepholes, phases, normalization, spikes), and loops that do something to the state on its way."""

from __future__ import annotations

from collections import deque

import torch
from torch import Tensor, nn

from .case import BATCH, FEATURES, STEPS, UNITS, Family, drawn, expected, gru_step, lstm_step, series, zeros
from .cells import NO_ARGUMENT, MakemoreCell

case = Family()


class PeepholeCell(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gates = nn.Linear(FEATURES + UNITS, 4 * UNITS)
        self.peep = nn.Parameter(torch.randn(3, UNITS))

    def forward(self, x: Tensor, prev: tuple[Tensor, Tensor]) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        h, c = prev
        i, f, g, o = self.gates(torch.cat((x, h), -1)).chunk(4, -1)
        c_next = torch.sigmoid(f + self.peep[0] * c) * c + torch.sigmoid(i + self.peep[1] * c) * torch.tanh(g)
        h_next = torch.sigmoid(o + self.peep[2] * c_next) * torch.tanh(c_next)
        return h_next, (h_next, c_next)


class Peephole(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm_cell = PeepholeCell()

    def forward(self, x: Tensor, prev: tuple[Tensor, Tensor] | None = None) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        prev = prev or (x.new_zeros(x.shape[0], UNITS),) * 2  # one tensor, twice
        ys = []
        for t in range(x.shape[1]):
            y, prev = self.lstm_cell(x[:, t], prev)
            ys.append(y)
        return torch.stack(ys, 1), prev


@case(
    Peephole,
    expected("cell loop", "lstm_cell", track="lstm_cell", h=0, c=0),
    style="Peephole LSTM from scratch; both parts start as one and the same tensor of zeros.",
    inputs=series,
    carriable=True,
    own_start="zeros",
    resume=lambda model, states, x: model(x, (states[0]["h"], states[0]["c"])),
    join=(1, "last"),
)
def peephole_lstm(model, x, start):
    cell, run = model.lstm_cell, start(h=zeros(), c=zeros())
    to_f, to_i, to_o = cell.peep
    for t in range(x.shape[1]):
        i, f, g, o = cell.gates(torch.cat([x[:, t], run["h"]], 1)).split(UNITS, dim=1)
        c = (f + to_f * run["c"]).sigmoid() * run["c"] + (i + to_i * run["c"]).sigmoid() * g.tanh()
        run.keep(h=(o + to_o * c).sigmoid() * c.tanh(), c=c)
    return run.along("h"), (run["h"], run["c"])


class NormCell(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.ih, self.hh = nn.Linear(FEATURES, 4 * UNITS, bias=False), nn.Linear(UNITS, 4 * UNITS, bias=False)
        self.ln_i, self.ln_h, self.ln_c = nn.LayerNorm(4 * UNITS), nn.LayerNorm(4 * UNITS), nn.LayerNorm(UNITS)

    def forward(self, x: Tensor, hx: Tensor, cx: Tensor) -> tuple[Tensor, Tensor]:
        i, f, g, o = (self.ln_i(self.ih(x)) + self.ln_h(self.hh(hx))).chunk(4, 1)
        cy = self.ln_c(f.sigmoid() * cx + i.sigmoid() * g.tanh())
        return o.sigmoid() * cy.tanh(), cy


class NormLSTM(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell = NormCell()

    def forward(self, x: Tensor) -> Tensor:
        hx = cx = torch.zeros(x.size(0), UNITS)
        outputs = torch.empty(x.size(0), x.size(1), UNITS)
        for t, frame in enumerate(x.unbind(1)):
            hx, cx = self.cell(frame, hx, cx)
            outputs[:, t] = hx
        return outputs


@case(
    NormLSTM,
    expected("cell loop", "cell", track="cell", hx=0, cx=0),
    style="LayerNorm LSTM: the parts are two arguments, outputs are written into an empty tensor.",
    inputs=series,
    carriable=True,
    own_start="zeros",
    resume=NO_ARGUMENT,
)
def layer_norm_lstm(model, x, start):
    def norm(v, layer):
        v = v - v.mean(1, keepdim=True)
        return v / (v.pow(2).mean(1, keepdim=True) + layer.eps).sqrt() * layer.weight + layer.bias

    cell, run = model.cell, start(hx=zeros(), cx=zeros())
    for t in range(x.shape[1]):
        gates = norm(x[:, t] @ cell.ih.weight.T, cell.ln_i) + norm(run["hx"] @ cell.hh.weight.T, cell.ln_h)
        i, f, g, o = gates.chunk(4, 1)
        c = norm(f.sigmoid() * run["cx"] + i.sigmoid() * g.tanh(), cell.ln_c)
        run.keep(hx=o.sigmoid() * c.tanh(), cx=c)
    return run.along("hx")


class PhasedLSTM(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTMCell(FEATURES, UNITS)
        self.tau, self.shift = nn.Parameter(torch.rand(UNITS) * 4 + 2), nn.Parameter(torch.rand(UNITS))

    def openness(self, times: Tensor) -> Tensor:
        phase = torch.frac((times[:, None] - self.shift) / self.tau)
        return torch.where(phase < 0.3, phase / 0.3, torch.where(phase < 0.6, 2 - phase / 0.3, 0.01 * phase))

    def forward(self, x: Tensor, times: Tensor) -> Tensor:
        h_s = c_s = x.new_zeros(x.size(0), UNITS)
        out = []
        for t in range(x.size(1)):
            h_new, c_new = self.lstm(x[:, t], (h_s, c_s))
            k = self.openness(times[:, t])
            h_s, c_s = k * h_new + (1 - k) * h_s, k * c_new + (1 - k) * c_s
            out.append(h_s)
        return torch.stack(out, 1)


@case(
    PhasedLSTM,
    expected("cell loop", "", h_s=0, c_s=0),
    style="Phased LSTM: time stamps are an input, and what goes back in is a mixture of a cell's result and the past.",
    inputs=lambda: ((drawn(BATCH, STEPS, FEATURES), drawn(BATCH, STEPS).abs().cumsum(1)), {}),
    carriable=True,
    own_start="zeros",
    resume=NO_ARGUMENT,
    cut_inputs=(0, 1),
)
def phased_lstm(model, x, times, start):
    run = start(h_s=zeros(), c_s=zeros())
    for t in range(x.shape[1]):
        h, c = lstm_step(model.lstm, x[:, t], run["h_s"], run["c_s"])
        run.gave(h_s=h, c_s=c)
        k = model.openness(times[:, t])
        run.keep(h_s=k * h + (1 - k) * run["h_s"], c_s=k * c + (1 - k) * run["c_s"])
    return run.along("h_s")


class CenteredCell(MakemoreCell):
    def forward(self, xt: Tensor, hprev: Tensor) -> Tensor:
        h = super().forward(xt, hprev)
        return h - h.mean(dim=0, keepdim=True)


class OneCellLoop(nn.Module):
    """The loop that everybody writes, with a place where the state can be changed on its way."""

    def __init__(self, cell: nn.Module) -> None:
        super().__init__()
        self.rnn = cell

    def on_the_way(self, h: Tensor, t: int) -> Tensor:
        return h

    def forward(self, x: Tensor) -> Tensor:
        h, out = torch.zeros(x.shape[0], UNITS), []
        for t in range(x.shape[1]):
            h = self.on_the_way(self.rnn(x[:, t], h), t)
            out.append(h)
        return torch.stack(out, 1)


OWN_ZEROS = {"inputs": series, "carriable": True, "own_start": "zeros", "resume": NO_ARGUMENT}


@case(
    lambda: OneCellLoop(CenteredCell()),
    expected("cell loop", "rnn", track="rnn", h=0),
    style="A cell that centers its state over the rows of the batch: rows are on axis 0, yet not independent.",
    **OWN_ZEROS,
)
def centered_over_rows(model, x, start):
    layer, run = model.rnn.xh_to_h, start(h=zeros())
    for t in range(x.shape[1]):
        h = layer(torch.cat([x[:, t], run["h"]], 1)).tanh()
        run.keep(h=h - h.sum(0) / BATCH)
    return run.along("h")


class Detached(OneCellLoop):
    def on_the_way(self, h: Tensor, t: int) -> Tensor:
        return h.detach()


@case(
    lambda: Detached(nn.GRUCell(FEATURES, UNITS)),
    expected("cell loop", "rnn", track="rnn", h=0),
    style="A loop that detaches the state at each step, as truncated training by hand does.",
    **OWN_ZEROS,
)
def detached_each_step(model, x, start):
    run = start(h=zeros())
    for t in range(x.shape[1]):
        run.keep(h=gru_step(model.rnn, x[:, t], run["h"]).detach())
    return run.along("h")


class Dropped(OneCellLoop):
    def on_the_way(self, h: Tensor, t: int) -> Tensor:
        return nn.functional.dropout(h, 0.4, self.training)


@case(
    lambda: Dropped(nn.GRUCell(FEATURES, UNITS)),
    expected("cell loop", "rnn", track="rnn", h=0),
    style="Recurrent dropout: the state itself is dropped at each step, with new draws.",
    **OWN_ZEROS,
)
def dropout_in_the_loop(model, x, start):
    run = start(h=zeros())
    for t in range(x.shape[1]):
        h = gru_step(model.rnn, x[:, t], run["h"])
        run.gave(h=h)
        run.keep(h=h * nn.functional.dropout(torch.ones(BATCH, UNITS), 0.4, True))
    return run.along("h")


class BatchNormed(OneCellLoop):
    def __init__(self, cell: nn.Module) -> None:
        super().__init__(cell)
        self.norms = nn.ModuleList([nn.BatchNorm1d(UNITS) for _ in range(STEPS)])
        for norm in self.norms:
            nn.init.uniform_(norm.weight, 0.5, 1.5)  # as after training: no two steps are the same

    def on_the_way(self, h: Tensor, t: int) -> Tensor:
        return self.norms[t](h)


@case(
    lambda: BatchNormed(nn.GRUCell(FEATURES, UNITS)),
    expected("cell loop", "rnn", track="rnn", h=0),
    style="Recurrent batch normalization, in training: each step has statistics and weights of its own.",
    **(OWN_ZEROS | {"carriable": False, "resume": "each step has weights by its number"}),
)
def batch_norm_per_step(model, x, start):
    run = start(h=zeros())
    for t in range(x.shape[1]):
        h, norm = gru_step(model.rnn, x[:, t], run["h"]), model.norms[t]
        run.gave(h=h)
        h = (h - h.mean(0)) / (h.var(0, correction=0) + norm.eps).sqrt()
        run.keep(h=h * norm.weight + norm.bias)
    return run.along("h")


class Clockwork(OneCellLoop):
    def on_the_way(self, h: Tensor, t: int) -> Tensor:
        return h * torch.tensor([t % period == 0 for period in (1, 1, 2, 4, 8)])


@case(
    lambda: Clockwork(nn.GRUCell(FEATURES, UNITS)),
    expected("cell loop", "rnn", track="rnn", h=0),
    style="Clockwork units that reset by their period: positions are counted from zero in each call.",
    **(OWN_ZEROS | {"carriable": False, "resume": "steps are counted from zero"}),
)
def positions_from_zero(model, x, start):
    run = start(h=zeros())
    for t in range(x.shape[1]):
        awake = torch.tensor([float(t % period == 0) for period in (1, 1, 2, 4, 8)])
        h = gru_step(model.rnn, x[:, t], run["h"])
        run.gave(h=h)
        run.keep(h=h * awake)
    return run.along("h")


class Spiking(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(FEATURES, UNITS)
        self.lif = LeakyNeuron()

    def forward(self, x: Tensor) -> Tensor:
        mem, spikes = None, []
        for step in range(x.size(0)):
            spk, mem = self.lif(self.fc(x[step]), mem)
            spikes.append(spk)
        return torch.stack(spikes, dim=0)


class LeakyNeuron(nn.Module):
    def initial_state(self, input_: Tensor) -> Tensor:
        return torch.zeros_like(input_)

    def forward(self, input_: Tensor, mem: Tensor | None) -> tuple[Tensor, Tensor]:
        mem = self.initial_state(input_) if mem is None else mem
        fired = (mem > 0.5).float()
        mem = 0.9 * mem + input_ - 0.5 * fired.detach()
        return torch.sigmoid(10 * (mem - 0.5)), mem


@case(
    Spiking,
    expected("cell loop", "lif", track="lif", mem=0),
    style="Leaky neurons as in snntorch and norse: time first, a membrane of None at first, initial_state(x).",
    inputs=lambda: ((drawn(STEPS, BATCH, FEATURES),), {}),
    carriable=True,
    time_axis=0,
    own_start="zeros",
    resume=NO_ARGUMENT,
    join=0,
)
def leaky_neurons(model, x, start):
    run = start(mem=zeros())
    for t in range(x.shape[0]):
        run.keep(mem=0.9 * run["mem"] + model.fc(x[t]) - 0.5 * (run["mem"] > 0.5))
    return torch.sigmoid(10 * (run.along("mem", dim=0) - 0.5))


class Dilated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell = MakemoreCell()

    def forward(self, x: Tensor) -> Tensor:
        past, out = deque([torch.zeros(len(x), UNITS)] * 3, maxlen=3), []
        for frame in x.unbind(1):
            past.append(self.cell(frame, past[0]))
            out.append(past[-1])
        return torch.stack(out, 1)


@case(
    Dilated,
    expected("cell loop", "cell", oldest=0, middle=0, newest=0),
    style="Dilated RNN: a cell goes on from three steps ago, so the last three results are the state, in a deque.",
    **OWN_ZEROS,
)
def dilated_rnn(model, x, start):
    layer, run = model.cell.xh_to_h, start(oldest=zeros(), middle=zeros(), newest=zeros())
    for t in range(x.shape[1]):
        h = layer(torch.cat([x[:, t], run["oldest"]], 1)).tanh()
        run.keep(oldest=run["middle"], middle=run["newest"], newest=h)
    return run.along("newest")


class ContractCell(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.start = nn.LSTMCell(FEATURES, UNITS), nn.Parameter(torch.randn(2, UNITS))

    def initial_state(self, batch: int) -> tuple[Tensor, Tensor]:
        return self.start[0].expand(batch, -1), self.start[1].expand(batch, -1)

    def forward(self, inputs: Tensor, state: tuple[Tensor, Tensor]) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        state = self.lstm(inputs, state)
        return state[0] + inputs.mean(1, keepdim=True), state


class Unrolled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.core = ContractCell()

    def forward(self, x: Tensor, state: tuple[Tensor, Tensor] | None = None) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        state = self.core.initial_state(x.shape[0]) if state is None else state
        ys = []
        for frame in x.unbind(1):
            y, state = self.core(frame, state)
            ys.append(y)
        return torch.stack(ys, 1), state


@case(
    Unrolled,
    expected("cell loop", "core", track="core", h=0, c=0),
    style="Haiku's contract in PyTorch: initial_state(batch), here learned, and (inputs, state) to (output, state).",
    inputs=series,
    carriable=True,
    own_start="learned",
    resume=lambda model, states, x: model(x, (states[0]["h"], states[0]["c"])),
    join=(1, "last"),
)
def initial_state_of_a_batch(model, x, start):
    run = start(h=model.core.start[0].expand(BATCH, -1), c=model.core.start[1].expand(BATCH, -1))
    for t in range(x.shape[1]):
        h, c = lstm_step(model.core.lstm, x[:, t], run["h"], run["c"])
        run.keep(h=h, c=c)
    return run.along("h") + x.mean(2, keepdim=True), (run["h"], run["c"])
