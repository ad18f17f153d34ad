"""Models whose step is a module, called by a loop of the model: one argument is what it gave before."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .case import BATCH, FEATURES, STEPS, TOKENS, UNITS, Family, drawn, expected, gru_step, series, tokens, zeros

case = Family()

NO_ARGUMENT = "the model makes its own start in forward and takes no state"


class MakemoreCell(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.xh_to_h = nn.Linear(FEATURES + UNITS, UNITS)

    def forward(self, xt: Tensor, hprev: Tensor) -> Tensor:
        return torch.tanh(self.xh_to_h(torch.cat([xt, hprev], dim=1)))


class Makemore(nn.Module):
    def __init__(self, cell: nn.Module) -> None:
        super().__init__()
        self.start = nn.Parameter(torch.randn(1, UNITS))
        self.wte = nn.Embedding(TOKENS, FEATURES)
        self.cell = cell
        self.lm_head = nn.Linear(UNITS, TOKENS)

    def forward(self, idx: Tensor, targets: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        b, t = idx.size()
        emb = self.wte(idx)
        hprev, hiddens = self.start.expand((b, -1)), []
        for i in range(t):
            hprev = self.cell(emb[:, i, :], hprev)
            hiddens.append(hprev)
        logits = self.lm_head(torch.stack(hiddens, 1))
        loss = None if targets is None else F.cross_entropy(logits.view(-1, TOKENS), targets.view(-1))
        return logits, loss


MAKEMORE = {"inputs": tokens, "carriable": True, "own_start": "learned", "resume": NO_ARGUMENT, "join": (1, "last")}


@case(
    lambda: Makemore(MakemoreCell()),
    expected("cell loop", "cell", track="cell", h=0),
    style="Makemore's plain RNN: tokens, one Linear on [x, h], a learned start that is expanded.",
    **MAKEMORE,
)
def makemore_rnn(model, idx, start):
    layer, run = model.cell.xh_to_h, start(h=model.start.expand(BATCH, -1))
    for t in range(idx.shape[1]):
        x = model.wte.weight[idx[:, t]]
        run.keep(h=(x @ layer.weight[:, :FEATURES].T + run["h"] @ layer.weight[:, FEATURES:].T + layer.bias).tanh())
    return model.lm_head(run.along("h")), None


class MakemoreGRUCell(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.xh_to_z = nn.Linear(FEATURES + UNITS, UNITS)
        self.xh_to_r = nn.Linear(FEATURES + UNITS, UNITS)
        self.xh_to_hbar = nn.Linear(FEATURES + UNITS, UNITS)

    def forward(self, xt: Tensor, hprev: Tensor) -> Tensor:
        xh = torch.cat([xt, hprev], dim=1)
        z, r = torch.sigmoid(self.xh_to_z(xh)), torch.sigmoid(self.xh_to_r(xh))
        hbar = torch.tanh(self.xh_to_hbar(torch.cat([xt, r * hprev], dim=1)))
        return (1 - z) * hprev + z * hbar


@case(
    lambda: Makemore(MakemoreGRUCell()),
    expected("cell loop", "cell", track="cell", h=0),
    style="Makemore's GRU, written with three Linears.",
    **MAKEMORE,
)
def makemore_gru(model, idx, start):
    cell, run = model.cell, start(h=model.start.expand(BATCH, -1))
    for t in range(idx.shape[1]):
        x, h = model.wte.weight[idx[:, t]], run["h"]
        z, r = (F.linear(torch.cat([x, h], 1), g.weight, g.bias).sigmoid() for g in (cell.xh_to_z, cell.xh_to_r))
        candidate = F.linear(torch.cat([x, r * h], 1), cell.xh_to_hbar.weight, cell.xh_to_hbar.bias).tanh()
        run.keep(h=h + z * (candidate - h))
    return model.lm_head(run.along("h")), None


class ConvLSTMCell(nn.Module):
    def __init__(self, channels: int, hidden: int) -> None:
        super().__init__()
        self.hidden_dim = hidden
        self.conv = nn.Conv2d(channels + hidden, 4 * hidden, 3, padding=1)

    def forward(self, input_tensor: Tensor, cur_state: list[Tensor]) -> tuple[Tensor, Tensor]:
        h_cur, c_cur = cur_state
        i, f, o, g = torch.split(self.conv(torch.cat([input_tensor, h_cur], dim=1)), self.hidden_dim, dim=1)
        c_next = torch.sigmoid(f) * c_cur + torch.sigmoid(i) * torch.tanh(g)
        return torch.sigmoid(o) * torch.tanh(c_next), c_next

    def init_hidden(self, batch: int, size: tuple[int, int]) -> tuple[Tensor, Tensor]:
        return tuple(torch.zeros(batch, self.hidden_dim, *size) for _ in range(2))


class ConvLSTM(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell_list = nn.ModuleList([ConvLSTMCell(2, 3), ConvLSTMCell(3, 3)])

    def forward(self, x: Tensor, hidden_state: list | None = None) -> tuple[Tensor, list]:
        b, steps, _, height, width = x.size()
        if hidden_state is None:
            hidden_state = [cell.init_hidden(b, (height, width)) for cell in self.cell_list]
        last = []
        for cell, (h, c) in zip(self.cell_list, hidden_state, strict=True):
            inner = []
            for t in range(steps):
                h, c = cell(input_tensor=x[:, t], cur_state=[h, c])
                inner.append(h)
            x = torch.stack(inner, dim=1)
            last.append([h, c])
        return x, last


@case(
    ConvLSTM,
    expected("cell loop", "cell_list.0", track="cell_list.0", h=0, c=0),
    expected("cell loop", "cell_list.1", track="cell_list.1", h=0, c=0),
    style="ConvLSTM_pytorch: two convolutional cells, 4-D states, called by keyword, layer after layer.",
    inputs=lambda: ((drawn(BATCH, STEPS, 2, 4, 4),), {}),
    carriable=True,
    own_start="zeros",
    resume=lambda model, states, x: model(x, [(s["h"], s["c"]) for s in states]),
    join=(1, "last"),
)
def conv_lstm(model, x, start):
    last = []
    for cell in model.cell_list:
        run = start(h=zeros(BATCH, 3, 4, 4), c=zeros(BATCH, 3, 4, 4))
        for t in range(x.shape[1]):
            gates = F.conv2d(torch.cat([x[:, t], run["h"]], 1), cell.conv.weight, cell.conv.bias, padding=1)
            i, f, o = (gates[:, 3 * k : 3 * k + 3].sigmoid() for k in range(3))
            c = f * run["c"] + i * gates[:, 9:].tanh()
            run.keep(h=o * c.tanh(), c=c)
        x = run.along("h")
        last.append([run["h"], run["c"]])
    return x, last


class GraphGRUCell(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        ring = torch.eye(4).roll(1, 0)
        self.register_buffer("support", (ring + ring.T + torch.eye(4)) / 3)
        self.gates, self.candidate = nn.Linear(2 + 3, 6), nn.Linear(2 + 3, 3)

    def forward(self, inputs: Tensor, hx: Tensor) -> Tensor:
        state = hx.view(-1, 4, 3)
        x = inputs.view(-1, 4, 2)
        r, u = torch.sigmoid(self.gates(self.support @ torch.cat([x, state], -1))).chunk(2, -1)
        new = torch.tanh(self.candidate(self.support @ torch.cat([x, r * state], -1)))
        return (u * state + (1 - u) * new).reshape(-1, 12)


class DCRNN(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell = GraphGRUCell()
        self.head = nn.Linear(12, 4)

    def forward(self, inputs: Tensor, encoder_hidden_state: Tensor | None = None) -> tuple[Tensor, Tensor]:
        if encoder_hidden_state is None:
            encoder_hidden_state = torch.zeros(inputs.size(1), 12)
        outputs = []
        for t in range(inputs.size(0)):
            encoder_hidden_state = self.cell(inputs[t], encoder_hidden_state)
            outputs.append(self.head(encoder_hidden_state))
        return torch.stack(outputs), encoder_hidden_state


@case(
    DCRNN,
    expected("cell loop", "cell", track="cell", hx=0),
    style="DCRNN: a GRU cell on a graph, time first, nodes and units flattened into one axis of the state.",
    inputs=lambda: ((drawn(STEPS, BATCH, 8),), {}),
    carriable=True,
    time_axis=0,
    own_start="zeros",
    resume=lambda model, states, x: model(x, states[0]["hx"]),
    join=(0, "last"),
)
def dcrnn(model, inputs, start):
    cell, run = model.cell, start(hx=zeros(BATCH, 12))
    for x in inputs.view(-1, BATCH, 4, 2):
        h = run["hx"].view(BATCH, 4, 3)
        gates = cell.gates(torch.einsum("mn,bnf->bmf", cell.support, torch.cat([x, h], 2))).sigmoid()
        reset, update = gates[..., :3], gates[..., 3:]
        new = cell.candidate(torch.einsum("mn,bnf->bmf", cell.support, torch.cat([x, reset * h], 2))).tanh()
        run.keep(hx=(update * h + (1 - update) * new).reshape(BATCH, 12))
    return model.head(run.along("hx", dim=0)), run["hx"]


class StackedCells(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rnns = nn.ModuleList([nn.GRUCell(FEATURES, UNITS), nn.GRUCell(UNITS, UNITS)])
        self.out = nn.Linear(UNITS, 2)

    def forward(self, x: Tensor, hidden: Tensor | None = None) -> tuple[Tensor, Tensor]:
        if hidden is None:
            hidden = torch.zeros(len(self.rnns), x.size(0), UNITS)
        outs = []
        for frame in torch.unbind(x, dim=1):
            new = []
            for level, rnn in enumerate(self.rnns):
                frame = rnn(frame, hidden[level])
                new.append(frame)
            hidden = torch.stack(new)
            outs.append(self.out(frame))
        return torch.stack(outs, dim=1), hidden


@case(
    StackedCells,
    expected("cell loop", "rnns.0", track="rnns.0", h=0),
    expected("cell loop", "rnns.1", track="rnns.1", h=0),
    style="Cells in a ModuleList, their states stacked into (layers, batch, unit) and indexed again at each step.",
    inputs=series,
    carriable=True,
    own_start="zeros",
    resume=lambda model, states, x: model(x, torch.stack([s["h"] for s in states])),
    join=(1, "last"),
)
def stacked_cells(model, x, start):
    low, high = start(h=zeros()), start(h=zeros())
    for t in range(x.shape[1]):
        low.keep(h=gru_step(model.rnns[0], x[:, t], low["h"]))
        high.keep(h=gru_step(model.rnns[1], low["h"], high["h"]))
    return model.out(high.along("h")), torch.stack([low["h"], high["h"]])


class PlainList(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.steps = [nn.GRUCell(FEATURES, UNITS)]  # not registered: named_modules does not know it
        self.out = nn.Linear(UNITS, 2)

    def forward(self, x: Tensor) -> Tensor:
        s = torch.zeros(x.shape[0], UNITS)
        for frame in x.unbind(1):
            s = self.steps[0](frame, s)
        return self.out(s)


@case(
    PlainList,
    expected("cell loop", "", s=0),
    style="A cell in a plain Python list, which PyTorch does not register: a frequent slip in course work.",
    inputs=series,
    carriable=True,
    own_start="zeros",
    resume=NO_ARGUMENT,
    join="last",
)
def unregistered_cell(model, x, start):
    run = start(s=zeros())
    for t in range(x.shape[1]):
        run.keep(s=gru_step(model.steps[0], x[:, t], run["s"]))
    return model.out(run["s"])


class ForwardCalled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell = MakemoreCell()

    def forward(self, x: Tensor) -> Tensor:
        memory, outs = x.new_zeros(x.shape[0], UNITS), []
        for frame in x.transpose(0, 1):
            memory = self.cell.forward(frame, memory)
            outs.append(memory)
        return torch.stack(outs, 1)


@case(
    ForwardCalled,
    expected("cell loop", "cell", track="cell", memory=0),
    style="A cell called through .forward, so that no hook of PyTorch hears it.",
    inputs=series,
    carriable=True,
    own_start="zeros",
    resume=NO_ARGUMENT,
)
def forward_called(model, x, start):
    layer, run = model.cell.xh_to_h, start(memory=zeros())
    for t in range(x.shape[1]):
        run.keep(memory=torch.tanh(layer.weight @ torch.cat([x[:, t], run["memory"]], 1).T + layer.bias[:, None]).T)
    return run.along("memory")
