"""Layers: a whole sequence in one call, with or without a state argument, Python or fused, scripted or quantized."""

from __future__ import annotations

import warnings

import torch
from torch import Tensor, nn
from torch.nn import functional as F

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

case = Family()


def lstm_run(layer, x, start, h=None, c=None):
    """One layer of torch's LSTM along (batch, time, feature)."""
    run = start(h=zeros() if h is None else h, c=zeros() if c is None else c)
    for t in range(x.shape[1]):
        h, c = lstm_step(layer, x[:, t], run["h"], run["c"], "_l0")
        run.keep(h=h, c=c)
    return run


class LiGRULayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w, self.u = nn.Linear(FEATURES, 2 * UNITS, bias=False), nn.Linear(UNITS, 2 * UNITS, bias=False)
        self.norm = nn.BatchNorm1d(2 * UNITS)
        self.register_buffer("h_init", torch.zeros(1, UNITS))

    def forward(self, x: Tensor, hx: Tensor | None = None) -> Tensor:
        w = self.w(x)
        w = self.norm(w.reshape(-1, w.shape[2])).reshape(w.shape)
        ht = self.h_init.expand(x.shape[0], -1) if hx is None else hx
        hiddens = []
        for k in range(w.shape[1]):
            at, zt = (w[:, k] + self.u(ht)).chunk(2, 1)
            zt = torch.sigmoid(zt)
            ht = zt * ht + (1 - zt) * torch.relu(at)
            hiddens.append(ht)
        return torch.stack(hiddens, dim=1)


class LiGRU(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.ModuleList([LiGRULayer()])

    def forward(self, x: Tensor, hx: Tensor | None = None) -> tuple[Tensor, Tensor]:
        h = []
        for layer in self.rnn:
            x = layer(x, None if hx is None else hx[0])
            h.append(x[:, -1])
        return x, torch.stack(h)


@case(
    lambda: LiGRU().eval(),
    expected("layer loop", "rnn.0", ht=0),
    style="Speechbrain's LiGRU: the inner layer takes a state and returns none but its outputs; zeros in a buffer.",
    inputs=series,
    carriable=True,
    own_start="expanded",
    resume=lambda model, states, x: model(x, states[0]["ht"][None]),
    join=(1, "last"),
)
def li_gru(model, x, start):
    layer, run = model.rnn[0], start(ht=zeros())
    for t in range(x.shape[1]):
        w = layer.w(x[:, t]) / (1 + layer.norm.eps) ** 0.5 * layer.norm.weight + layer.norm.bias
        a, z = (w + layer.u(run["ht"])).split(UNITS, 1)
        run.keep(ht=z.sigmoid() * run["ht"] + (1 - z.sigmoid()) * a.clamp(min=0))
    return run.along("ht"), run["ht"][None]


class Alternating(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer_0, self.layer_1 = nn.LSTM(FEATURES, UNITS, batch_first=True), nn.LSTM(UNITS, UNITS, batch_first=True)

    def forward(self, inputs: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        out, (h0, c0) = self.layer_0(inputs)
        out, (h1, c1) = self.layer_1(out.flip(1))
        return out.flip(1), (torch.cat([h0, h1]), torch.cat([c0, c1]))


@case(
    Alternating,
    expected("layer", "layer_0", track="layer_0.l0", h=0, c=0),
    expected("layer", "layer_1", track="layer_1.l0", h=0, c=0),
    style="AllenNLP's stack of alternating LSTMs: every other layer reads from the end.",
    inputs=series,
    carriable=False,
    resume="every other layer reads from the end of the whole",
    own_start="zeros",
    join=(1, "last"),
)
def alternating_lstm(model, inputs, start):
    low = lstm_run(model.layer_0, inputs, start)
    high = lstm_run(model.layer_1, low.along("h").flip(1), start)
    last = [torch.stack([low[part], high[part]]) for part in "hc"]
    return high.along("h").flip(1), tuple(last)


class WeightDrop(nn.Module):
    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        self.raw = nn.Parameter(module.weight_hh_l0.data.clone())
        del module._parameters["weight_hh_l0"]
        module.weight_hh_l0 = self.raw.data

    def forward(self, *args):
        self.module.weight_hh_l0 = F.dropout(self.raw, 0.5, self.training)
        return self.module(*args)


class AWD(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Embedding(TOKENS, FEATURES)
        self.rnn = WeightDrop(nn.LSTM(FEATURES, UNITS))
        self.decoder = nn.Linear(UNITS, TOKENS)

    def forward(self, ids: Tensor, hidden: tuple | None = None) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # weights in pieces of memory: known, and slower only
            out, hidden = self.rnn(self.encoder(ids), hidden)
        return self.decoder(out), hidden


@case(
    AWD,
    expected("layer", "rnn.module", track="rnn.module.l0", h=0, c=0),
    style="AWD-LSTM: recurrent weights are dropped once in each call, time first. Pieces draw other weights.",
    inputs=lambda: ((tokens()[0][0].T.contiguous(),), {}),
    carriable=False,
    resume="each call draws weights of its own",
    time_axis=0,
    own_start="zeros",
    join=(0, "last"),
)
def awd_lstm(model, ids, start):
    layer = model.rnn.module
    layer.weight_hh_l0 = model.rnn.raw * F.dropout(torch.ones(4 * UNITS, UNITS), 0.5, True)
    run = lstm_run(layer, model.encoder.weight[ids].transpose(0, 1), start)
    return model.decoder(run.along("h", dim=0)), (run["h"][None], run["c"][None])


class Predictor(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(TOKENS, FEATURES)
        self.dec_rnn = nn.LSTM(FEATURES, UNITS, batch_first=True)

    def forward(self, targets: Tensor, state: tuple | None = None, add_sos: bool = True) -> tuple[Tensor, tuple]:
        y = self.embed(targets)
        if add_sos:
            y = torch.cat([torch.zeros(y.shape[0], 1, y.shape[2]), y], 1)
        g, state = self.dec_rnn(y, state)
        return g, state


@case(
    Predictor,
    expected("layer", "dec_rnn", STEPS + 1, track="dec_rnn.l0", h=0, c=0),
    style="The prediction network of a transducer: each call puts a start symbol in front, which pieces have twice.",
    inputs=tokens,
    carriable=False,
    resume="each call has a start symbol of its own",
    own_start="zeros",
    join=(1, "last"),
)
def transducer_predictor(model, targets, start):
    y = torch.cat([zeros(BATCH, 1, FEATURES), model.embed.weight[targets]], 1)
    run = lstm_run(model.dec_rnn, y, start)
    return run.along("h"), (run["h"][None], run["c"][None])


class PythonLSTM(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.input_size, self.hidden_size, self.num_layers, self.batch_first = FEATURES, UNITS, 1, True
        for name, value in nn.LSTM(FEATURES, UNITS).named_parameters():
            self.register_parameter(name, value)

    @staticmethod
    def _cell(x, hx, cx, w_ih, b_ih, w_hh, b_hh):
        i, f, g, o = (F.linear(x, w_ih, b_ih) + F.linear(hx, w_hh, b_hh)).chunk(4, 1)
        cy = cx * f.sigmoid() + i.sigmoid() * g.tanh()
        return o.sigmoid() * cy.tanh(), cy

    def forward(self, input: Tensor, hx: tuple[Tensor, Tensor] | None = None) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        if hx is None:
            hx = tuple(torch.zeros(1, input.size(0), UNITS) for _ in range(2))
        (h,), (c,) = (part.unbind(0) for part in hx)
        weights = self.weight_ih_l0, self.bias_ih_l0, self.weight_hh_l0, self.bias_hh_l0
        outputs = []
        for x_t in input.unbind(1):
            h, c = self._cell(x_t, h, c, *weights)
            outputs.append(h)
        return torch.stack(outputs, 1), (torch.stack([h]), torch.stack([c]))


@case(
    PythonLSTM,
    expected("layer loop", "", h=0, c=0),
    style="Torchrl's LSTM in Python, with torch's weights, argument and layout; its steps are a static method.",
    inputs=series,
    carriable=True,
    own_start="zeros",
    resume=lambda model, states, x: model(x, (states[0]["h"][None], states[0]["c"][None])),
    join=(1, "last"),
)
def python_lstm(model, input, start):
    run = lstm_run(model, input, start)
    return run.along("h"), (run["h"][None], run["c"][None])


class ScriptedCore(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Linear(4 + 5, 5)

    def forward(self, x: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        outs: list[Tensor] = []
        for t in range(x.size(1)):
            h = torch.tanh(self.w(torch.cat([x[:, t], h], 1)))
            outs.append(h)
        return torch.stack(outs, 1), h


class Scripted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self.core = torch.jit.script(ScriptedCore())

    def forward(self, x: Tensor) -> Tensor:
        return self.core(x, torch.zeros(x.shape[0], 5))[0]


@case(
    Scripted,
    expected("layer", "core", h=0),
    style="Torch's custom LSTM examples: the layer with its loop is scripted, so no operation in it is seen.",
    inputs=series,
    carriable=True,
    own_start="zeros",
    resume=NO_ARGUMENT,
)
def scripted_layer(model, x, start):
    w, run = model.core.w, start(h=zeros())
    for t in range(x.shape[1]):
        run.keep(h=torch.tanh(torch.cat([x[:, t], run["h"]], 1) @ w.weight.T + w.bias))
    return run.along("h")


class Quantized(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            plain = nn.ModuleDict({"lstm": nn.LSTM(FEATURES, UNITS, batch_first=True)})
            self.plain = [plain["lstm"]]
            self.lstm = torch.ao.quantization.quantize_dynamic(plain, {nn.LSTM}, dtype=torch.qint8)["lstm"]

    def forward(self, x: Tensor) -> Tensor:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return self.lstm(x)[0]


@case(
    Quantized,
    expected("layer", "lstm", track="lstm.l0", h=0, c=0),
    style="Torch's dynamically quantized LSTM. Eight bits: equal to the equations within a hundredth only.",
    inputs=series,
    carriable=None,
    resume="the input's scale is that of the whole call: within eight bits, but not exactly",
    own_start="zeros",
    tolerance=0.02,
)
def quantized_lstm(model, x, start):
    return lstm_run(model.plain[0], x, start).along("h")


class Hierarchical(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.word, self.sentence = nn.GRU(FEATURES, UNITS, batch_first=True), nn.GRU(UNITS, 2, batch_first=True)

    def forward(self, docs: Tensor) -> Tensor:
        b, s, w, f = docs.shape
        _, last = self.word(docs.reshape(b * s, w, f))
        return self.sentence(last[0].view(b, s, UNITS))[0]


@case(
    Hierarchical,
    expected("layer", "word", 6, track="word.l0", rows=4 * BATCH, h=0),
    expected("layer", "sentence", 4, track="sentence.l0", s=0),
    style="Hierarchical RNN: words to sentences, sentences to documents; the words' layer has a row for each sentence.",
    inputs=lambda: ((drawn(BATCH, 4, 6, FEATURES),), {}),
    carriable=None,
    resume="the words' layer must begin anew with each sentence, the sentences' layer may go on",
    own_start="zeros",
)
def hierarchical(model, docs, start):
    words, sentences = start(h=zeros(4 * BATCH, UNITS)), start(s=zeros(BATCH, 2))
    for t in range(6):
        words.keep(h=gru_step(model.word, docs.flatten(0, 1)[:, t], words["h"], "_l0"))
    for row in words["h"].view(BATCH, 4, UNITS).unbind(1):
        sentences.keep(s=gru_step(model.sentence, row, sentences["s"], "_l0"))
    return sentences.along("s")
