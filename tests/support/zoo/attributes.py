"""States that a model keeps in its attributes from call to call."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .case import BATCH, FEATURES, STEPS, UNITS, Family, drawn, expected, gru_step, lstm_step, rnn_step, series, zeros

case = Family()

KEEPS = {"inputs": series, "carriable": True, "own_start": "attribute", "changes_itself": True}


class SelfHidden(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(FEATURES, UNITS, batch_first=True)
        self.hidden = self.init_hidden()

    def init_hidden(self) -> tuple[Tensor, Tensor]:
        return torch.zeros(1, BATCH, UNITS), torch.zeros(1, BATCH, UNITS)

    def forward(self, x: Tensor) -> Tensor:
        self.hidden = tuple(part.detach() for part in self.hidden)
        out, self.hidden = self.lstm(x, self.hidden)
        return out


def resume_self_hidden(model, states, x):
    model.hidden = (states[0]["h"][None], states[0]["c"][None])
    return model(x)


@case(
    SelfHidden,
    expected("attribute layer", "lstm", track="lstm.l0", h=0, c=0),
    style="The tutorials' self.hidden: a tuple kept between calls, detached in forward, begun again by init_hidden().",
    resume=resume_self_hidden,
    kept=lambda model: {"h": model.hidden[0][0], "c": model.hidden[1][0]},
    **KEEPS,
)
def self_hidden(model, x, start):
    run = start(h=zeros(), c=zeros())
    for t in range(x.shape[1]):
        h, c = lstm_step(model.lstm, x[:, t], run["h"], run["c"], "_l0")
        run.keep(h=h, c=c)
    return run.along("h")


class IntegrateAndFire(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.v = 0.0

    def reset(self) -> None:
        self.v = 0.0

    def forward(self, x: Tensor) -> Tensor:
        if isinstance(self.v, float):
            self.v = torch.full_like(x, self.v)
        self.v = self.v + (x - self.v) / 2
        spike = torch.sigmoid(4 * (self.v - 1))
        self.v = self.v * (1 - spike)
        return spike


class SpikingNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc, self.sn = nn.Linear(FEATURES, UNITS), IntegrateAndFire()

    def forward(self, x_seq: Tensor) -> Tensor:
        return torch.stack([self.sn(self.fc(x)) for x in x_seq])


def resume_spiking(model, states, x):
    model.sn.v = states[0]["v"]
    return model(x)


@case(
    SpikingNet,
    expected("attribute loop cell", "sn", v=0),
    style="Spikingjelly: a neuron module keeps its voltage, a Python float until the first input gives it a shape.",
    resume=resume_spiking,
    kept=lambda model: {"v": model.sn.v},
    **(KEEPS | {"inputs": lambda: ((drawn(STEPS, BATCH, FEATURES),), {}), "time_axis": 0, "join": 0}),
)
def float_that_becomes_a_voltage(model, x_seq, start):
    run, spikes = start(v=zeros()), []
    for t in range(x_seq.shape[0]):
        v = (run["v"] + model.fc(x_seq[t])) / 2
        spikes.append(torch.sigmoid(4 * v - 4))
        run.keep(v=v - v * spikes[-1])
    return torch.stack(spikes)


class OneStep(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc, self.out = nn.Linear(FEATURES, UNITS), nn.Linear(UNITS, 2)
        self.mem = torch.zeros(0)

    def reset_mem(self) -> None:
        self.mem = torch.zeros(0)

    def forward(self, x: Tensor) -> Tensor:
        current = self.fc(x)
        if self.mem.shape != current.shape:
            self.mem = torch.zeros_like(current)
        self.mem = 0.8 * self.mem + current - (self.mem > 1).float()
        return self.out(torch.sigmoid(5 * (self.mem - 1)))


@case(
    OneStep,
    expected("attribute", "", 1, mem=0),
    style="Snntorch with init_hidden: the model takes one step in each call, its membrane is empty at first.",
    inputs=lambda: ((drawn(BATCH, FEATURES),), {}),
    carriable=None,
    resume="one call is one step: there is nothing to cut, yet calls go on",
    time_axis=None,
    own_start="attribute",
    kept=lambda model: {"mem": model.mem},
    changes_itself=True,
)
def one_step_per_call(model, x, start):
    run = start(mem=zeros())
    run.keep(mem=0.8 * run["mem"] + model.fc(x) - (run["mem"] > 1).float())
    return model.out(torch.sigmoid(5 * (run["mem"] - 1)))


class BufferState(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell, self.norm = nn.GRUCell(FEATURES, UNITS), nn.BatchNorm1d(FEATURES)
        self.register_buffer("state", torch.zeros(BATCH, UNITS))

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x.transpose(1, 2)).transpose(1, 2)
        h, out = self.state.clone(), []
        for frame in x.unbind(1):
            h = self.cell(frame, h)
            out.append(h)
        self.state.copy_(h.detach())
        return torch.stack(out, 1)


@case(
    BufferState,
    expected("attribute cell loop", "cell", state=0),
    style="A state in a buffer, written by copy_, beside the running statistics of a BatchNorm, which are none.",
    **(KEEPS | {"carriable": False}),
    resume="the statistics of a piece are not those of the whole",
    kept=lambda model: {"state": model.state},
)
def buffer_beside_statistics(model, x, start):
    x = (x - x.mean((0, 1))) / (x.var((0, 1), correction=0) + model.norm.eps).sqrt()
    x = x * model.norm.weight + model.norm.bias
    run = start(state=zeros())
    for t in range(x.shape[1]):
        run.keep(state=gru_step(model.cell, x[:, t], run["state"]))
    return run.along("state")


class ListState(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.RNNCell(FEATURES, UNITS), nn.RNNCell(UNITS, UNITS)])
        self.memories = [None, None]

    def reset(self) -> None:
        self.memories = [None, None]

    def forward(self, x: Tensor) -> Tensor:
        out = []
        for frame in x.unbind(1):
            for k, layer in enumerate(self.layers):
                frame = layer(frame, self.memories[k])
                self.memories[k] = frame.detach()
            out.append(frame)
        return torch.stack(out, 1)


def resume_list(model, states, x):
    model.memories = [state["h"] for state in states]
    return model(x)


@case(
    ListState,
    expected("attribute cell loop", "layers.0", h=0),
    expected("attribute cell loop", "layers.1", h=0),
    style="A list of states in an attribute, None at first, written by index in the loop.",
    resume=resume_list,
    **KEEPS,
    kept=lambda model: {"h": model.memories[1]},
)
def list_of_states(model, x, start):
    low, high, out = start(h=zeros()), start(h=zeros()), []
    for t in range(x.shape[1]):
        below = rnn_step(model.layers[0], x[:, t], low["h"])
        out.append(rnn_step(model.layers[1], below, high["h"]))
        low.keep(h=below.detach())
        high.keep(h=out[-1].detach())
    return torch.stack(out, 1)


class GatedLinear(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.conv_w = nn.Linear(FEATURES, FEATURES), nn.Parameter(torch.randn(3, FEATURES))
        self.cache: dict[str, Tensor] = {}

    def forward(self, x: Tensor) -> Tensor:
        window = self.cache.get("conv", x.new_zeros(len(x), 2, FEATURES))
        h, out = self.cache.get("rg_lru", x.new_zeros(len(x), FEATURES)), []
        padded = torch.cat([window, x], 1)
        mixed = sum(padded[:, k : k + x.shape[1]] * self.conv_w[k] for k in range(3))
        for u in mixed.unbind(1):
            a = torch.sigmoid(self.gate(u))
            h = a * h + torch.sqrt(1 - a * a) * u
            out.append(h)
        self.cache = {"conv": padded[:, -2:].detach(), "rg_lru": h.detach()}
        return torch.stack(out, 1)


def resume_cache(model, states, x):
    model.cache = {"conv": states[1]["conv"], "rg_lru": states[0]["rg_lru"]}
    return model(x)


@case(
    GatedLinear,
    expected("attribute loop", "", rg_lru=0),
    expected("attribute cache", "", 1, conv=0),
    style="RecurrentGemma: a dict in an attribute holds the linear recurrence and the window of its convolution.",
    resume=resume_cache,
    kept=lambda model: model.cache,
    **KEEPS,
)
def dict_of_state_and_window(model, x, start):
    run, window = start(rg_lru=zeros(BATCH, FEATURES)), start(conv=zeros(BATCH, 2, FEATURES))
    frames = [*window["conv"].unbind(1), *x.unbind(1)]
    for t in range(x.shape[1]):
        u = frames[t] * model.conv_w[0] + frames[t + 1] * model.conv_w[1] + frames[t + 2] * model.conv_w[2]
        a = model.gate(u).sigmoid()
        run.keep(rg_lru=a * run["rg_lru"] + (1 - a**2).sqrt() * u)
    window.keep(conv=torch.stack(frames[-2:], 1))
    return run.along("rg_lru")


class CachedAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(FEATURES, UNITS, bias=False) for _ in range(3))
        self.past_k = self.past_v = None

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.q(x), self.k(x), self.v(x)
        before = 0 if self.past_k is None else self.past_k.shape[1]
        if before:
            k, v = torch.cat([self.past_k, k], 1), torch.cat([self.past_v, v], 1)
        self.past_k, self.past_v = k, v
        mask = torch.ones(x.shape[1], k.shape[1], dtype=torch.bool).tril(before)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)


def resume_attention(model, states, x):
    model.past_k, model.past_v = states[0]["past_k"], states[0]["past_v"]
    return model(x)


@case(
    CachedAttention,
    expected("cache attribute", "", 1, past_k=0, past_v=0),
    style="Causal attention with its keys and values kept in attributes: a cache that grows with each call.",
    resume=resume_attention,
    kept=lambda model: {"past_k": model.past_k, "past_v": model.past_v},
    **KEEPS,
)
def key_value_cache(model, x, start):
    run = start(past_k=zeros(BATCH, 0, UNITS), past_v=zeros(BATCH, 0, UNITS))
    before, out = run["past_k"].shape[1], []
    run.keep(past_k=torch.cat([run["past_k"], model.k(x)], 1), past_v=torch.cat([run["past_v"], model.v(x)], 1))
    for t in range(x.shape[1]):
        k, v = run["past_k"][:, : before + t + 1], run["past_v"][:, : before + t + 1]
        weights = (torch.einsum("bh,bth->bt", model.q(x[:, t]), k) / UNITS**0.5).softmax(1)
        out.append(torch.einsum("bt,bth->bh", weights, v))
    return torch.stack(out, 1)


class StreamingConv(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(FEATURES, 2, 3)
        self.register_buffer("tail", torch.zeros(BATCH, FEATURES, 2), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        padded = torch.cat([self.tail, x.transpose(1, 2)], 2)
        self.tail = padded[..., -2:]
        return self.conv(padded).transpose(1, 2)


def resume_conv(model, states, x):
    model.tail = states[0]["tail"]
    return model(x)


@case(
    StreamingConv,
    expected("cache attribute", "", 1, tail=0),
    style="A streaming causal convolution that keeps its last frames, as speech front ends do.",
    resume=resume_conv,
    kept=lambda model: {"tail": model.tail},
    **KEEPS,
)
def streaming_convolution(model, x, start):
    run, out = start(tail=zeros(BATCH, FEATURES, 2)), []
    frames = [*run["tail"].unbind(2), *x.unbind(1)]
    for t in range(x.shape[1]):
        out.append(sum(frames[t + k] @ model.conv.weight[..., k].T for k in range(3)) + model.conv.bias)
    run.keep(tail=torch.stack(frames[-2:], 2))
    return torch.stack(out, 1)


class StatefulReservoir(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("w_fb", torch.randn(FEATURES, UNITS))
        self.register_buffer("w_hh", torch.randn(UNITS, UNITS) / 3)
        self.state = None

    def reset_state(self) -> None:
        self.state = None

    def forward(self, feedback: Tensor) -> Tensor:
        if self.state is None or self.state.shape[0] != feedback.shape[0]:
            self.state = torch.zeros(feedback.shape[0], UNITS)
        outs = torch.empty(*feedback.shape[:2], UNITS)
        for t in range(feedback.shape[1]):
            self.state = 0.5 * self.state + 0.5 * torch.tanh(feedback[:, t] @ self.w_fb + self.state @ self.w_hh)
            outs[:, t] = self.state
        return outs


def resume_reservoir(model, states, x):
    model.state = states[0]["state"]
    return model(x)


@case(
    StatefulReservoir,
    expected("attribute loop", "", state=0),
    style="ResDAG: a reservoir layer that keeps its state between calls until reset_state().",
    resume=resume_reservoir,
    kept=lambda model: {"state": model.state},
    **KEEPS,
)
def stateful_reservoir(model, feedback, start):
    run = start(state=zeros())
    for t in range(feedback.shape[1]):
        drive = feedback[:, t] @ model.w_fb + run["state"] @ model.w_hh
        run.keep(state=(run["state"] + drive.tanh()) / 2)
    return run.along("state")
