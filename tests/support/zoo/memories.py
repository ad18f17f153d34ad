"""Networks with a memory beside their controller, and stateful encoders that fit it to each batch."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .case import BATCH, FEATURES, UNITS, Family, expected, gru_step, lstm_step, series, zeros

case = Family()


def looked_up(memory: Tensor, key: Tensor) -> Tensor:
    """Weights over the slots of a memory (batch, slot, width), by cosine."""
    return F.softmax(4 * F.cosine_similarity(memory + 1e-6, key[:, None] + 1e-6, dim=-1), dim=1)


class NTM(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.controller = nn.LSTMCell(FEATURES + 2, UNITS)
        self.key, self.add, self.erase, self.gate = (nn.Linear(UNITS, k) for k in (2, 2, 2, 1))
        self.register_buffer("mem_bias", torch.randn(4, 2))
        self.reset(BATCH)

    def reset(self, batch: int) -> None:
        self.memory = self.mem_bias.clone().repeat(batch, 1, 1)
        self.read, self.weights = torch.zeros(batch, 2), torch.full((batch, 4), 0.25)
        self.state = (torch.zeros(batch, UNITS), torch.zeros(batch, UNITS))

    def forward(self, x: Tensor) -> Tensor:
        out = []
        for t in range(x.shape[1]):
            self.state = self.controller(torch.cat([x[:, t], self.read], 1), self.state)
            h = self.state[0]
            gate = torch.sigmoid(self.gate(h))
            self.weights = gate * looked_up(self.memory, self.key(h)) + (1 - gate) * self.weights
            erase = self.weights[..., None] * torch.sigmoid(self.erase(h))[:, None]
            self.memory = self.memory * (1 - erase) + self.weights[..., None] * self.add(h)[:, None]
            self.read = (self.weights[..., None] * self.memory).sum(1)
            out.append(torch.cat([h, self.read], 1))
        return torch.stack(out, 1)


NTM_PARTS = ("memory", "read", "weights")


def resume_ntm(model, states, x):
    for name in NTM_PARTS:
        setattr(model, name, states[0][name])
    model.state = (states[0]["h"], states[0]["c"])
    return model(x)


@case(
    NTM,
    expected("attribute loop", "", derived=("read",), memory=0, read=0, weights=0, h=0, c=0),
    style="Pytorch-ntm: memory, read vector, weights and controller in attributes, begun again by reset(batch).",
    inputs=series,
    carriable=True,
    own_start="attribute",
    resume=resume_ntm,
    kept=lambda model: {name: getattr(model, name) for name in NTM_PARTS} | dict(zip("hc", model.state, strict=True)),
    changes_itself=True,
)
def neural_turing_machine(model, x, start):
    own = {"memory": model.mem_bias.expand(BATCH, 4, 2), "read": zeros(BATCH, 2), "weights": zeros(BATCH, 4) + 0.25}
    run, out = start(**own, h=zeros(), c=zeros()), []
    for t in range(x.shape[1]):
        h, c = lstm_step(model.controller, torch.cat([x[:, t], run["read"]], 1), run["h"], run["c"])
        gate = model.gate(h).sigmoid()
        weights = run["weights"] + gate * (looked_up(run["memory"], model.key(h)) - run["weights"])
        kept = 1 - torch.einsum("bn,bm->bnm", weights, model.erase(h).sigmoid())
        memory = kept * run["memory"] + torch.einsum("bn,bm->bnm", weights, model.add(h))
        run.keep(memory=memory, read=torch.einsum("bn,bnm->bm", weights, memory), weights=weights, h=h, c=c)
        out.append(torch.cat([h, run["read"]], 1))
    return torch.stack(out, 1)


class DNC(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.controller = nn.GRUCell(FEATURES + 2, UNITS)
        self.interface = nn.Linear(UNITS, 2 + 2 + 1 + 3)

    def fresh(self, batch: int) -> tuple[Tensor, dict[str, Tensor], Tensor]:
        sizes = {"memory": (3, 2), "usage": (3,), "precedence": (3,), "link": (3, 3), "read_weights": (3,)}
        hidden = {name: torch.full((batch, *size), 1e-3) for name, size in sizes.items()}
        return torch.zeros(batch, UNITS), hidden, torch.zeros(batch, 2)

    def forward(self, x: Tensor, hx: tuple | None = None) -> tuple[Tensor, tuple]:
        chx, mhx, last_read = self.fresh(x.size(0)) if hx is None else hx
        outs = []
        for frame in x.unbind(1):
            chx = self.controller(torch.cat([frame, last_read], 1), chx)
            key, write, gate, mode = self.interface(chx).split([2, 2, 1, 3], 1)
            mhx, last_read = self.access(mhx, key, write, torch.sigmoid(gate), F.softmax(mode, 1))
            outs.append(torch.cat([chx, last_read], 1))
        return torch.stack(outs, 1), (chx, mhx, last_read)

    def access(self, m: dict[str, Tensor], key: Tensor, write: Tensor, gate: Tensor, mode: Tensor) -> tuple:
        usage = m["usage"] + (1 - m["usage"]) * m["read_weights"] * 0.5
        w = gate * F.softmax(-4 * usage, 1)
        memory = m["memory"] * (1 - w[..., None]) + w[..., None] * write[:, None]
        link = (1 - w[..., None] - w[:, None]) * m["link"] + w[..., None] * m["precedence"][:, None]
        precedence = (1 - w.sum(1, keepdim=True)) * m["precedence"] + w
        follow = (link @ m["read_weights"][..., None])[..., 0]
        back = (link.mT @ m["read_weights"][..., None])[..., 0]
        r = mode[:, :1] * looked_up(memory, key) + mode[:, 1:2] * follow + mode[:, 2:] * back
        new = {"memory": memory, "usage": usage, "precedence": precedence, "link": link, "read_weights": r}
        return new, (r[:, None] @ memory)[:, 0]


DNC_PARTS = ("memory", "usage", "precedence", "link", "read_weights")


@case(
    DNC,
    expected("loop layer", "", derived=("last_read",), chx=0, last_read=0, **dict.fromkeys(DNC_PARTS, 0)),
    style="Pytorch-dnc: memory, links, precedence, usage and weights in a dict in a tuple.",
    inputs=series,
    carriable=True,
    own_start="zeros",
    resume=lambda m, s, x: m(x, (s[0]["chx"], {name: s[0][name] for name in DNC_PARTS}, s[0]["last_read"])),
    join=(1, "last"),
)
def differentiable_computer(model, x, start):
    chx, mhx, last_read = model.fresh(BATCH)
    run, outs = start(chx=chx, last_read=last_read, **mhx), []
    for t in range(x.shape[1]):
        h = gru_step(model.controller, torch.cat([x[:, t], run["last_read"]], 1), run["chx"])
        key, write, gate, mode = model.interface(h).split([2, 2, 1, 3], 1)
        mode, old = mode.softmax(1), run["read_weights"]
        usage = run["usage"] + (1 - run["usage"]) * old / 2
        w = gate.sigmoid() * (-4 * usage).softmax(1)
        memory, link = torch.empty(BATCH, 3, 2), torch.empty(BATCH, 3, 3)
        for i in range(3):
            memory[:, i] = run["memory"][:, i] * (1 - w[:, i : i + 1]) + w[:, i : i + 1] * write
            for j in range(3):
                link[:, i, j] = (1 - w[:, i] - w[:, j]) * run["link"][:, i, j] + w[:, i] * run["precedence"][:, j]
        r = mode[:, :1] * looked_up(memory, key)
        r = (
            r
            + mode[:, 1:2] * torch.einsum("bij,bj->bi", link, old)
            + mode[:, 2:] * torch.einsum("bji,bj->bi", link, old)
        )
        parts = {"precedence": (1 - w.sum(1)[:, None]) * run["precedence"] + w, "memory": memory, "link": link}
        run.keep(chx=h, last_read=torch.einsum("bi,bim->bm", r, memory), usage=usage, read_weights=r, **parts)
        outs.append(torch.cat([h, run["last_read"]], 1))
    hidden = {name: run[name] for name in DNC_PARTS}
    return torch.stack(outs, 1), (run["chx"], hidden, run["last_read"])


class StatefulEncoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(FEATURES, UNITS, batch_first=True)
        self._states: tuple[Tensor, Tensor] | None = None

    def reset_states(self) -> None:
        self._states = None

    def _fitting(self, batch: int) -> tuple[Tensor, Tensor] | None:
        if self._states is None:
            return None
        short = batch - self._states[0].shape[1]
        return tuple(F.pad(part, (0, 0, 0, max(short, 0)))[:, :batch] for part in self._states)

    def forward(self, inputs: Tensor) -> Tensor:
        out, final = self.lstm(inputs, self._fitting(inputs.shape[0]))
        self._states = tuple(part.data for part in final)
        return out


def resume_encoder(model, states, x):
    model._states = (states[0]["h"][None], states[0]["c"][None])
    return model(x)


@case(
    StatefulEncoder,
    expected("attribute layer", "lstm", track="lstm.l0", h=0, c=0),
    style="ELMo's stateful encoder: the layer's state is kept between batches, padded where a batch has more rows.",
    inputs=series,
    carriable=True,
    own_start="attribute",
    resume=resume_encoder,
    kept=lambda model: {"h": model._states[0][0], "c": model._states[1][0]},
    changes_itself=True,
)
def stateful_encoder(model, inputs, start):
    run = start(h=zeros(), c=zeros())
    for t in range(inputs.shape[1]):
        h, c = lstm_step(model.lstm, inputs[:, t], run["h"], run["c"], "_l0")
        run.keep(h=h, c=c)
    return run.along("h")
