"""Torch's own layers inside models: packed, stepped, started by an encoder or a parameter, outputs of all makes."""

from __future__ import annotations

from collections import OrderedDict

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from .case import (
    BATCH,
    FEATURES,
    STEPS,
    TOKENS,
    UNITS,
    Family,
    drawn,
    expected,
    gru_step,
    lstm_step,
    series,
    tokens,
    zeros,
)
from .cells import NO_ARGUMENT
from .layers import lstm_run

case = Family()


class ModelOutput(OrderedDict):
    def __getattr__(self, name):
        return self[name]


class Hub(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embeddings = nn.Embedding(TOKENS, FEATURES)
        self.lstm = nn.LSTM(FEATURES, UNITS, batch_first=True)
        self.lm_head = nn.Linear(UNITS, TOKENS)

    def forward(self, *, input_ids: Tensor, past: tuple | None = None, labels: Tensor | None = None) -> ModelOutput:
        hidden, past = self.lstm(self.embeddings(input_ids), past)
        out = ModelOutput(logits=self.lm_head(hidden), past_h=past[0], past_c=past[1])
        if labels is not None:
            out["loss"] = F.cross_entropy(out.logits.flatten(0, 1), labels.flatten())
        return out


@case(
    Hub,
    expected("layer", "lstm", track="lstm.l0", h=0, c=0),
    style="In the manner of Hugging Face: keywords only, an ordered dict with attributes as output.",
    inputs=lambda: ((), {"input_ids": tokens()[0][0]}),
    carriable=True,
    own_start="zeros",
    resume=lambda model, s, input_ids: model(input_ids=input_ids, past=(s[0]["h"][None], s[0]["c"][None])),
    cut_inputs=("input_ids",),
    join={"logits": 1, "past_h": "last", "past_c": "last"},
)
def hub_output(model, input_ids, start):
    run = lstm_run(model.lstm, model.embeddings.weight[input_ids], start)
    return {"logits": model.lm_head(run.along("h")), "past_h": run["h"][None], "past_c": run["c"][None]}


class SteppedLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gru = nn.GRU(FEATURES, UNITS, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        hidden, outs = None, []
        for t in range(x.size(1)):
            out, hidden = self.gru(x[:, t : t + 1], hidden)
            outs.append(out)
        return torch.cat(outs, 1)


@case(
    SteppedLayer,
    expected("layer cell loop", "gru", track="gru.l0", hidden=1),
    style="Torch's fused layer used as a cell: one step in each call, None at first.",
    inputs=series,
    carriable=True,
    own_start=None,
    resume=NO_ARGUMENT,
)
def fused_layer_stepped(model, x, start):
    run = start(hidden=zeros(1, BATCH, UNITS))
    for t in range(x.shape[1]):
        run.keep(hidden=gru_step(model.gru, x[:, t], run["hidden"][0], "_l0")[None])
    return torch.cat([h.transpose(0, 1) for h in run.parts["hidden"][1:]], 1)


class LearnedStart(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.h0 = nn.Parameter(torch.randn(1, 1, UNITS))
        self.rnn = nn.GRU(FEATURES, UNITS, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.rnn(x, self.h0.expand(-1, x.size(0), -1).contiguous())[0]


@case(
    LearnedStart,
    expected("layer", "rnn", track="rnn.l0", h=0),
    style="A learned first state, expanded over the rows and handed to torch's layer.",
    inputs=series,
    carriable=True,
    own_start="learned",
    resume=NO_ARGUMENT,
)
def learned_start(model, x, start):
    run = start(h=model.h0[0].expand(BATCH, -1))
    for t in range(x.shape[1]):
        run.keep(h=gru_step(model.rnn, x[:, t], run["h"], "_l0"))
    return run.along("h")


class Captioner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cnn = nn.Conv2d(3, UNITS, 3)
        self.init_h, self.init_c = nn.Linear(UNITS, UNITS), nn.Linear(UNITS, UNITS)
        self.embed, self.lstm = nn.Embedding(TOKENS, FEATURES), nn.LSTM(FEATURES, UNITS, batch_first=True)

    def encode(self, image: Tensor) -> Tensor:
        return self.cnn(image).relu().mean((2, 3))

    def forward(self, captions: Tensor, image: Tensor) -> Tensor:
        feature = self.encode(image)
        start = (self.init_h(feature).tanh()[None], self.init_c(feature)[None])
        return self.lstm(self.embed(captions), start)[0]


@case(
    Captioner,
    expected("layer", "lstm", track="lstm.l0", h=0, c=0),
    style="An image captioner in the style of Show and Tell: the image makes the first state.",
    inputs=lambda: ((tokens()[0][0], drawn(BATCH, 3, 5, 5)), {}),
    carriable=True,
    own_start="encoder",
    resume=NO_ARGUMENT,
)
def image_captioner(model, captions, image, start):
    feature = model.encode(image)
    x = model.embed.weight[captions]
    return lstm_run(model.lstm, x, start, model.init_h(feature).tanh(), model.init_c(feature)).along("h")


class PackedInside(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(FEATURES, UNITS, batch_first=True)

    def forward(self, x: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        out, (h, _) = self.lstm(packed)
        return pad_packed_sequence(out, batch_first=True, total_length=x.shape[1])[0], h[-1]


@case(
    PackedInside,
    expected("layer", "lstm", track="lstm.l0", h=0, c=0),
    style="Padded in, packed inside, padded out: the everyday text classifier.",
    inputs=lambda: ((drawn(BATCH, STEPS, FEATURES), torch.tensor([4, 7, 2])), {}),
    carriable=None,
    resume="lengths count from the start of the whole",
    own_start="zeros",
)
def packed_inside(model, x, lengths, start):
    run, outs = start(h=zeros(), c=zeros()), []
    for t in range(x.shape[1]):
        live = (t < lengths)[:, None]
        h, c = lstm_step(model.lstm, x[:, t], run["h"], run["c"], "_l0")
        run.keep(h=torch.where(live, h, run["h"]), c=torch.where(live, c, run["c"]))
        outs.append(h * live)
    return torch.stack(outs, 1), run["h"]


class IndRNN(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight_ih, self.weight_hh = nn.Linear(FEATURES, UNITS), nn.Parameter(torch.rand(UNITS))

    def forward(self, x: Tensor, h0: Tensor | None = None) -> Tensor:
        h = h0 if h0 is not None else torch.zeros(x.shape[1], UNITS)
        return torch.stack([h := F.relu(self.weight_ih(frame) + self.weight_hh * h) for frame in x])


@case(
    IndRNN,
    expected("loop layer", "", h=0),
    style="IndRNN in one comprehension with an assignment in it, time first.",
    inputs=lambda: ((drawn(STEPS, BATCH, FEATURES),), {}),
    carriable=True,
    time_axis=0,
    own_start="zeros",
    resume=lambda model, states, x: model(x, states[0]["h"]),
    join=0,
)
def ind_rnn(model, x, start):
    run = start(h=zeros())
    for t in range(x.shape[0]):
        run.keep(h=(model.weight_ih(x[t]) + model.weight_hh * run["h"]).clamp(min=0))
    return run.along("h", dim=0)
