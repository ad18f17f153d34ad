"""Decoders: attention in the loop, what was put out fed back in, and parts of the state that no argument names."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .case import BATCH, FEATURES, STEPS, TOKENS, UNITS, Family, drawn, expected, gru_step, lstm_step, tokens, zeros
from .cells import NO_ARGUMENT

case = Family()

MEMORY = 6  # steps of what a decoder attends to
PICKS = 4


def memory() -> Tensor:
    return drawn(BATCH, MEMORY, UNITS, seed=4)


class Tacotron(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention_rnn, self.decoder_rnn = nn.LSTMCell(FEATURES + UNITS, UNITS), nn.LSTMCell(2 * UNITS, UNITS)
        self.query, self.location = nn.Linear(UNITS, UNITS), nn.Conv1d(2, UNITS, 3, padding=1)
        self.projection = nn.Linear(2 * UNITS, FEATURES)

    def initialize_decoder_states(self, memory: Tensor) -> None:
        b, steps, _ = memory.shape
        self.attention_hidden = self.attention_cell = memory.new_zeros(b, UNITS)
        self.decoder_hidden = self.decoder_cell = memory.new_zeros(b, UNITS)
        self.attention_weights = self.attention_weights_cum = memory.new_zeros(b, steps)
        self.attention_context = memory.new_zeros(b, UNITS)

    def decode(self, frame: Tensor, memory: Tensor) -> Tensor:
        cell_input = torch.cat([frame, self.attention_context], -1)
        self.attention_hidden, self.attention_cell = self.attention_rnn(
            cell_input, (self.attention_hidden, self.attention_cell)
        )
        past = self.location(torch.stack([self.attention_weights, self.attention_weights_cum], 1)).transpose(1, 2)
        energies = torch.tanh(self.query(self.attention_hidden)[:, None] + memory + past).sum(-1)
        self.attention_weights = F.softmax(energies, 1)
        self.attention_weights_cum = self.attention_weights_cum + self.attention_weights
        self.attention_context = torch.bmm(self.attention_weights[:, None], memory)[:, 0]
        decoder_input = torch.cat([self.attention_hidden, self.attention_context], -1)
        self.decoder_hidden, self.decoder_cell = self.decoder_rnn(
            decoder_input, (self.decoder_hidden, self.decoder_cell)
        )
        return self.projection(torch.cat([self.decoder_hidden, self.attention_context], 1))

    def forward(self, frames: Tensor, memory: Tensor) -> Tensor:
        self.initialize_decoder_states(memory)
        return torch.stack([self.decode(frame, memory) for frame in frames])


TACOTRON = ("attention_hidden", "attention_cell", "decoder_hidden", "decoder_cell")
ATTENTION = ("attention_weights", "attention_weights_cum", "attention_context")


@case(
    Tacotron,
    expected("loop attribute", "", derived=("attention_context",), **dict.fromkeys(TACOTRON + ATTENTION, 0)),
    style="Tacotron 2's decoder: two cells, attention sums and context, in attributes that each call begins anew.",
    inputs=lambda: ((drawn(STEPS, BATCH, FEATURES), memory()), {}),
    carriable=True,
    time_axis=0,
    own_start="zeros",
    resume="each call begins its attributes anew",
    join=0,
)
def tacotron_decoder(model, frames, memory, start):
    own = dict.fromkeys(TACOTRON, zeros()) | dict.fromkeys(ATTENTION[:2], zeros(BATCH, MEMORY))
    run, out = start(**own, attention_context=zeros()), []
    for t in range(frames.shape[0]):
        x = torch.cat([frames[t], run["attention_context"]], 1)
        h, c = lstm_step(model.attention_rnn, x, run["attention_hidden"], run["attention_cell"])
        past = model.location(torch.stack([run["attention_weights"], run["attention_weights_cum"]], 1))
        weights = (model.query(h)[:, None] + memory + past.mT).tanh().sum(-1).softmax(1)
        context = torch.einsum("bt,bth->bh", weights, memory)
        x = torch.cat([h, context], 1)
        d, e = lstm_step(model.decoder_rnn, x, run["decoder_hidden"], run["decoder_cell"])
        total = run["attention_weights_cum"] + weights
        cells = dict(zip(TACOTRON, (h, c, d, e), strict=True))
        run.keep(**cells, **dict(zip(ATTENTION, (weights, total, context), strict=True)))
        out.append(model.projection(torch.cat([d, context], 1)))
    return torch.stack(out)


class InputFeeding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.rnn = nn.Embedding(TOKENS, FEATURES), nn.LSTMCell(FEATURES + UNITS, UNITS)
        self.attn_in, self.attn_out = nn.Linear(UNITS, UNITS, bias=False), nn.Linear(2 * UNITS, UNITS, bias=False)
        self.state = {}

    def init_state(self, memory: Tensor) -> None:
        self.state["hidden"] = (memory.mean(1), memory.amax(1))
        self.state["input_feed"] = torch.zeros(memory.shape[0], UNITS)

    def forward(self, tgt: Tensor, memory: Tensor) -> Tensor:
        self.init_state(memory)
        input_feed, hidden, outs = self.state["input_feed"], self.state["hidden"], []
        for emb_t in self.embed(tgt).split(1, dim=1):
            hidden = self.rnn(torch.cat([emb_t.squeeze(1), input_feed], 1), hidden)
            align = F.softmax(torch.bmm(memory, self.attn_in(hidden[0])[..., None])[..., 0], 1)
            context = torch.bmm(align[:, None], memory)[:, 0]
            input_feed = torch.tanh(self.attn_out(torch.cat([context, hidden[0]], 1)))
            outs.append(input_feed)
        self.state["hidden"], self.state["input_feed"] = hidden, input_feed
        return torch.stack(outs, 1)


@case(
    InputFeeding,
    expected("loop cell attribute", "", derived=("input_feed",), h=0, c=0, input_feed=0),
    style="OpenNMT's decoder with input feeding: the attentional output goes back in; the encoder makes the start.",
    inputs=lambda: ((tokens()[0][0], memory()), {}),
    carriable=True,
    own_start="encoder",
    resume="each call begins its dict anew",
)
def input_feeding(model, tgt, memory, start):
    run = start(h=memory.mean(1), c=memory.max(1).values, input_feed=zeros())
    for t in range(tgt.shape[1]):
        x = torch.cat([model.embed.weight[tgt[:, t]], run["input_feed"]], 1)
        h, c = lstm_step(model.rnn, x, run["h"], run["c"])
        align = torch.einsum("bth,bh->bt", memory, h @ model.attn_in.weight.T).softmax(1)
        context = torch.einsum("bt,bth->bh", align, memory)
        run.keep(h=h, c=c, input_feed=model.attn_out(torch.cat([context, h], 1)).tanh())
    return run.along("input_feed")


class Handwriting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell, self.window = nn.GRUCell(3 + UNITS, UNITS), nn.Linear(UNITS, 3 * 2)
        self.out = nn.Linear(2 * UNITS, 3)

    def forward(self, strokes: Tensor, chars: Tensor) -> Tensor:
        h = w = torch.zeros(strokes.shape[0], UNITS)
        kappa, ys = torch.zeros(strokes.shape[0], 2, 1), []
        at = torch.arange(chars.shape[1]).float()
        for stroke in strokes.unbind(1):
            h = self.cell(torch.cat([stroke, w], 1), h)
            alpha, beta, step = torch.exp(self.window(h))[..., None].chunk(3, 1)
            kappa = kappa + step / 10
            phi = (alpha * torch.exp(-beta * (kappa - at) ** 2)).sum(1)
            w = (phi[..., None] * chars).sum(1)
            ys.append(self.out(torch.cat([h, w], 1)))
        return torch.stack(ys, 1)


@case(
    Handwriting,
    expected("loop cell", "", derived=("w",), h=0, w=0, kappa=0),
    style="Graves' handwriting synthesis: the window and its offsets are parts, though no argument names the offsets.",
    inputs=lambda: ((drawn(BATCH, STEPS, 3), memory()), {}),
    carriable=True,
    own_start="zeros",
    resume=NO_ARGUMENT,
)
def handwriting_window(model, strokes, chars, start):
    run, ys = start(h=zeros(), w=zeros(), kappa=zeros(BATCH, 2, 1)), []
    for t in range(strokes.shape[1]):
        h = gru_step(model.cell, torch.cat([strokes[:, t], run["w"]], 1), run["h"])
        alpha, beta, step = model.window(h).exp().split(2, 1)
        kappa = run["kappa"] + step[..., None] / 10
        w = zeros()
        for position in range(MEMORY):
            phi = (alpha * (-beta * (kappa[..., 0] - position) ** 2).exp()).sum(1)
            w = w + phi[:, None] * chars[:, position]
        run.keep(h=h, w=w, kappa=kappa)
        ys.append(model.out(torch.cat([h, w], 1)))
    return torch.stack(ys, 1)


class Pointer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell, self.first = nn.GRUCell(UNITS, UNITS), nn.Parameter(torch.randn(UNITS))

    def forward(self, items: Tensor) -> Tensor:
        hidden, chosen = items.mean(1), self.first.expand(items.shape[0], -1)
        taken, scores = torch.zeros(items.shape[:2], dtype=torch.bool), []
        for _ in range(PICKS):
            hidden = self.cell(chosen, hidden)
            logits = (items @ hidden[..., None])[..., 0].masked_fill(taken, -1e4)
            best = logits.argmax(1)
            taken = taken.scatter(1, best[:, None], True)
            chosen = items[torch.arange(len(items)), best]
            scores.append(logits.log_softmax(1))
        return torch.stack(scores, 1)


@case(
    Pointer,
    expected("cell loop iteration", "", PICKS, derived=("chosen",), hidden=0, chosen=0, taken=0),
    style="A pointer network: each step picks an item of the input, feeds it back, and masks it from then on.",
    inputs=lambda: ((memory(),), {}),
    carriable=None,
    resume="steps of the output, and all of the input in each",
    time_axis=None,
    own_start="encoder",
)
def pointer_network(model, items, start):
    own = {"hidden": items.mean(1), "chosen": model.first.expand(BATCH, -1)}
    run, scores = start(**own, taken=torch.zeros(BATCH, items.shape[1], dtype=torch.bool)), []
    for _ in range(PICKS):
        hidden = gru_step(model.cell, run["chosen"], run["hidden"])
        logits = torch.where(run["taken"], torch.tensor(-1e4), torch.einsum("bth,bh->bt", items, hidden))
        taken, chosen = run["taken"].clone(), torch.empty(BATCH, UNITS)
        for row in range(BATCH):
            taken[row, logits[row].argmax()] = True
            chosen[row] = items[row, logits[row].argmax()]
        run.keep(hidden=hidden, chosen=chosen, taken=taken)
        scores.append(logits.log_softmax(1))
    return torch.stack(scores, 1)


class Generator(nn.Module):
    def __init__(self, draw: bool) -> None:
        super().__init__()
        self.draw = draw
        self.embed, self.cell = nn.Embedding(TOKENS, FEATURES), nn.GRUCell(FEATURES, UNITS)
        self.out = nn.Linear(UNITS, TOKENS)

    def forward(self, context: Tensor, length: int = STEPS) -> tuple[Tensor, Tensor]:
        hidden, token = context, torch.zeros(context.shape[0], dtype=torch.long)
        tokens, scores = [], []
        while len(tokens) < length:
            hidden = self.cell(self.embed(token), hidden)
            logits = self.out(hidden)
            token = torch.multinomial(logits.softmax(1), 1).squeeze(1) if self.draw else logits.argmax(1)
            tokens.append(token)
            scores.append(logits)
        return torch.stack(tokens, 1), torch.stack(scores, 1)


def generated(model, context, start):
    run, scores = start(hidden=context, token=torch.zeros(BATCH, dtype=torch.long)), []
    for _ in range(STEPS):
        hidden = gru_step(model.cell, model.embed.weight[run["token"]], run["hidden"])
        scores.append(model.out(hidden))
        probabilities = scores[-1].softmax(1)
        token = torch.multinomial(probabilities, 1)[:, 0] if model.draw else probabilities.argmax(1)
        run.keep(hidden=hidden, token=token)
    return run.along("token"), torch.stack(scores, 1)


# Nothing of the input in each repetition: by the definition that is an iteration, though a decoder calls it time.
GENERATES = {
    "inputs": lambda: ((drawn(BATCH, UNITS),), {}),
    "carriable": None,
    "resume": "no input along time that could be cut",
    "time_axis": None,
    "own_start": "encoder",
}
FED_BACK = expected("cell loop iteration", "", derived=("token",), hidden=0, token=0)


@case(lambda: Generator(False), FED_BACK, style="Greedy generation: the best token is the next input.", **GENERATES)
def greedy_generation(model, context, start):
    return generated(model, context, start)


@case(lambda: Generator(True), FED_BACK, style="Generation by drawing: the drawn token is the next input.", **GENERATES)
def drawn_generation(model, context, start):
    return generated(model, context, start)


class Transducer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.predict = nn.Embedding(TOKENS, UNITS), nn.GRUCell(UNITS, UNITS)
        self.joint = nn.Linear(FEATURES + UNITS, TOKENS)

    def forward(self, frames: Tensor) -> Tensor:
        g = self.predict(self.embed(torch.zeros(len(frames), dtype=torch.long)), torch.zeros(len(frames), UNITS))
        found = []
        for t in range(frames.shape[1]):
            scores = self.joint(torch.cat([frames[:, t], g], 1))
            symbol = scores.argmax(1)
            g = torch.where((symbol == 0)[:, None], g, self.predict(self.embed(symbol), g))
            found.append(scores)
        return torch.stack(found, 1)


@case(
    Transducer,
    expected("cell loop", "predict", g=0),
    style="Greedy decoding of a transducer: the predictor moves on only in rows that put out a symbol.",
    inputs=lambda: ((drawn(BATCH, STEPS, FEATURES),), {}),
    carriable=True,
    own_start="encoder",
    resume=NO_ARGUMENT,
)
def transducer_greedy(model, frames, start):
    begin = gru_step(model.predict, model.embed.weight[torch.zeros(BATCH, dtype=torch.long)], zeros())
    run, found = start(g=begin), []
    for t in range(frames.shape[1]):
        found.append(model.joint(torch.cat([frames[:, t], run["g"]], 1)))
        run.gave(g=gru_step(model.predict, model.embed.weight[found[-1].argmax(1)], run["g"]))
        rows = []
        for row, symbol in enumerate(found[-1].argmax(1).tolist()):
            old = run["g"][row : row + 1]
            rows.append(gru_step(model.predict, model.embed.weight[symbol][None], old) if symbol else old)
        run.keep(g=torch.cat(rows))
    return torch.stack(found, 1)
