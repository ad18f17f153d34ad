"""Loops written out in forward, with or without a cell: every way to go along time, and what stands around it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence

from .case import BATCH, FEATURES, STEPS, UNITS, Family, drawn, expected, gru_step, rnn_step, series, zeros
from .cells import NO_ARGUMENT

case = Family()

OWN_ZEROS = {"inputs": series, "carriable": True, "own_start": "zeros", "resume": NO_ARGUMENT}


class Elman(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.Wxh, self.Whh = nn.Parameter(torch.randn(FEATURES, UNITS) / 2), nn.Parameter(torch.randn(UNITS, UNITS) / 2)
        self.bh = nn.Parameter(torch.zeros(UNITS))

    def forward(self, x: Tensor) -> Tensor:
        h, hs = torch.zeros(x.shape[0], UNITS), []
        for t in range(x.shape[1]):
            h = torch.tanh(x[:, t] @ self.Wxh + h @ self.Whh + self.bh)
            hs.append(h)
        return torch.stack(hs, 1)


def elman_run(model, x, start):
    run = start(h=zeros())
    for t in range(x.shape[1]):
        run.keep(h=(torch.cat([x[:, t], run["h"]], 1) @ torch.cat([model.Wxh, model.Whh]) + model.bh).tanh())
    return run


@case(
    Elman,
    expected("loop layer", "", h=0),
    style="An Elman network from raw parameters, as in min-char-rnn.",
    **OWN_ZEROS,
)
def elman(model, x, start):
    return elman_run(model, x, start).along("h")


class Chunks(Elman):
    def forward(self, x: Tensor) -> Tensor:
        h, hs = x.new_zeros(x.shape[0], UNITS), []
        projected = torch.addmm(self.bh, x.reshape(-1, FEATURES), self.Wxh).view(x.shape[0], -1, UNITS)
        for piece in projected.chunk(x.shape[1], dim=1):
            h = torch.tanh(torch.addmm(piece.squeeze(1), h, self.Whh))
            hs.append(h)
        return torch.stack(hs, 1)


@case(
    Chunks,
    expected("loop layer", "", h=0),
    style="The input is projected for all steps at once, then chunked: only the recurrent product is in the loop.",
    **OWN_ZEROS,
)
def projected_then_chunked(model, x, start):
    return elman_run(model, x, start).along("h")


class Iterated(Elman):
    def forward(self, x: Tensor) -> dict[str, Tensor]:
        frames = iter(x.unbind(1))
        h = torch.tanh(next(frames) @ self.Wxh + self.bh)  # the first step has no state at all
        hs = [h]
        while True:
            try:
                frame = next(frames)
            except StopIteration:
                break
            h = torch.tanh(frame @ self.Wxh + h @ self.Whh + self.bh)
            hs += [h]
        return {"hs": torch.stack(hs, 1)}


@case(
    Iterated,
    expected("loop layer", "", h=0),
    style="A loop by iter and next, with a first step written apart that has no state: the start is implicit.",
    **(
        OWN_ZEROS | {"carriable": None, "own_start": None, "join": {"hs": 1}, "resume": "the first step has no operand"}
    ),
)
def first_step_apart(model, x, start):
    return {"hs": elman_run(model, x, start).along("h")}


class EarlyExit(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.GRUCell(FEATURES, UNITS)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        s, t = torch.zeros(len(x), UNITS), 0
        while t < x.shape[1]:
            if bool((t >= lengths).all()):
                break
            live = (t < lengths).unsqueeze(1)
            s = torch.where(live, self.cell(x[:, t], s), s)
            t += 1
        return s


@case(
    EarlyExit,
    expected("cell loop", "cell", 5, track="cell", s=0),
    style="A while loop that stops when all rows have ended; ended rows keep their state.",
    inputs=lambda: ((drawn(BATCH, STEPS, FEATURES), torch.tensor([5, 2, 4])), {}),
    carriable=None,
    resume="lengths count from the start of the whole",
    own_start="zeros",
    join="last",
)
def while_with_early_exit(model, x, lengths, start):
    run = start(s=zeros())
    for t in range(int(lengths.max())):
        new = gru_step(model.cell, x[:, t], run["s"])
        run.gave(s=new)
        run.keep(s=torch.stack([new[b] if t < lengths[b] else run["s"][b] for b in range(BATCH)]))
    return run["s"]


class PackedByHand(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.RNNCell(FEATURES, UNITS)

    def forward(self, packed: PackedSequence) -> tuple[PackedSequence, Tensor]:
        data, sizes, order, back = packed
        hx, at, outs = data.new_zeros(int(sizes[0]), UNITS), 0, []
        for size in sizes.tolist():
            new = self.cell(data[at : at + size], hx[:size])
            hx = torch.cat([new, hx[size:]])
            outs.append(new)
            at += size
        return PackedSequence(torch.cat(outs), sizes, order, back), hx


@case(
    PackedByHand,
    expected("cell loop", "cell", track="cell", hx=0),
    style="A packed sequence stepped by hand: fewer and fewer rows take part.",
    inputs=lambda: ((pack_padded_sequence(drawn(BATCH, STEPS, FEATURES), torch.tensor([7, 5, 2]), True),), {}),
    carriable=None,
    resume="a packed sequence has no time axis to cut",
    time_axis=None,
    own_start="zeros",
)
def packed_by_hand(model, packed, start):
    run, outs, at = start(hx=zeros()), [], 0
    for size in packed.batch_sizes.tolist():
        new = rnn_step(model.cell, packed.data[at : at + size], run["hx"][:size])
        run.gave(hx=new)
        run.keep(hx=torch.cat([new, run["hx"][size:]]))
        outs.append(new)
        at += size
    return PackedSequence(torch.cat(outs), packed.batch_sizes), run["hx"]


class Fronted(Elman):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(FEATURES, FEATURES, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(torch.relu(self.conv(x.transpose(1, 2))).transpose(1, 2))


@case(
    Fronted,
    expected("loop layer", "", h=0),
    style="A convolution in front of the loop: it looks across any cut.",
    **(OWN_ZEROS | {"carriable": False, "resume": "the convolution looks across the cut"}),
)
def convolution_in_front(model, x, start):
    padded = F.pad(x, (0, 0, 1, 1))
    seen = sum(padded[:, k : k + x.shape[1]] @ model.conv.weight[:, :, k].T for k in range(3)) + model.conv.bias
    return elman_run(model, seen.clamp(min=0), start).along("h")


class Attending(Elman):
    def forward(self, x: Tensor) -> Tensor:
        hs = super().forward(x)
        return torch.softmax(hs @ hs.transpose(1, 2), -1) @ hs


@case(
    Attending,
    expected("loop layer", "", h=0),
    style="Attention over all steps after the loop: early outputs need late states.",
    **(OWN_ZEROS | {"carriable": False, "resume": "attention looks across the cut"}),
)
def attention_after_the_loop(model, x, start):
    hs = elman_run(model, x, start).along("h")
    return torch.stack([torch.stack([(row @ h).softmax(0) @ row for h in row]) for row in hs])


class TwoLoops(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.W = nn.ParameterList([torch.randn(FEATURES + UNITS, UNITS) / 2, torch.randn(UNITS + 2, 2) / 2])

    def forward(self, x: Tensor) -> Tensor:
        a, mid = x.new_zeros(x.shape[0], UNITS), []
        for t in range(x.shape[1]):
            a = torch.tanh(torch.cat([x[:, t], a], 1) @ self.W[0])
            mid.append(a)
        b, top = x.new_zeros(x.shape[0], 2), []
        for m in mid:
            b = torch.sigmoid(torch.cat([m, b], 1) @ self.W[1])
            top.append(b)
        return torch.stack(top, 1)


@case(
    TwoLoops,
    expected("loop", "", a=0),
    expected("loop", "", b=0),
    style="Two loops in one forward, one after the other, as stacked layers are written by hand.",
    **OWN_ZEROS,
)
def two_loops(model, x, start):
    low, high = start(a=zeros()), start(b=zeros(BATCH, 2))
    for t in range(x.shape[1]):
        low.keep(a=torch.tanh(x[:, t] @ model.W[0][:FEATURES] + low["a"] @ model.W[0][FEATURES:]))
        high.keep(b=torch.sigmoid(low["a"] @ model.W[1][:UNITS] + high["b"] @ model.W[1][UNITS:]))
    return high.along("b")


@dataclass
class Encoded:
    last_hidden_state: Tensor
    pooled: Tensor


class CalledTwice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = Elman()

    def forward(self, x: Tensor, reply: Tensor) -> Encoded:
        hs = torch.cat([self.encoder(x), self.encoder(reply)], 1)
        return Encoded(last_hidden_state=hs, pooled=hs.mean(1))


@case(
    CalledTwice,
    expected("loop layer", "encoder", h=0),
    expected("loop layer", "encoder", h=0),
    style="One submodule with a loop in it, called twice; the model returns a dataclass.",
    inputs=lambda: ((*series()[0], drawn(BATCH, STEPS, FEATURES, seed=3)), {}),
    carriable=None,
    resume="two sequences, put side by side",
    own_start="zeros",
)
def submodule_called_twice(model, x, reply, start):
    hs = torch.cat([elman_run(model.encoder, one, start).along("h") for one in (x, reply)], 1)
    return Encoded(hs, hs.sum(1) / hs.shape[1])


def unrolled(layer: nn.Module) -> Callable[[Tensor], Tensor]:
    def run(x: Tensor) -> Tensor:
        return layer(x)[0]

    return run


class Hidden(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.apply_rnn = unrolled(nn.GRU(FEATURES, UNITS, batch_first=True))
        self.head = nn.Linear(UNITS, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.apply_rnn(x))


@case(
    Hidden,
    expected("layer", "", h=0),
    style="A wrapper that hides torch's GRU in a closure: no module of the model knows it.",
    **OWN_ZEROS,
)
def layer_in_a_closure(model, x, start):
    layer = model.apply_rnn.__closure__[0].cell_contents
    run = start(h=zeros())
    for t in range(x.shape[1]):
        run.keep(h=gru_step(layer, x[:, t], run["h"], "_l0"))
    return model.head(run.along("h"))


class SecondOrder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.one, self.two = nn.Linear(FEATURES, UNITS), nn.Linear(UNITS, UNITS), nn.Linear(UNITS, UNITS)

    def forward(self, x: Tensor) -> Tensor:
        older, newer, out = torch.zeros(len(x), UNITS), torch.zeros(len(x), UNITS), []
        for frame in x.unbind(1):
            older, newer = newer, torch.tanh(self.inner(frame) + self.one(newer) + self.two(older))
            out.append(newer)
        return torch.stack(out, 1)


@case(
    SecondOrder,
    expected("loop", "", older=0, newer=0),
    style="A second-order recurrence: the state before the last one crosses too.",
    **OWN_ZEROS,
)
def second_order(model, x, start):
    run = start(older=zeros(), newer=zeros())
    for t in range(x.shape[1]):
        new = model.inner(x[:, t]) + model.one(run["newer"]) + model.two(run["older"])
        run.keep(older=run["newer"], newer=new.tanh())
    return run.along("newer")


class Total(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.phi, self.rho = nn.Linear(FEATURES, UNITS), nn.Linear(UNITS, 2)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        total, count, ys = 0, 0, []
        for frame in x.unbind(1):
            total = total + torch.relu(self.phi(frame))
            count += 1
            ys.append(self.rho(total / 10).tanh())
        return torch.stack(ys, 1), torch.tensor(count)


@case(
    Total,
    expected("loop", "", total=0),
    style="A running sum that each step reads: a state, begun as the Python number 0, beside a count that is none.",
    **(OWN_ZEROS | {"carriable": None, "resume": "begins at a Python number, and counts from zero beside it"}),
)
def running_sum(model, x, start):
    run = start(total=zeros())
    for t in range(x.shape[1]):
        run.keep(total=run["total"] + model.phi(x[:, t]).clamp(min=0))
    return model.rho(run.along("total") / 10).tanh(), torch.tensor(x.shape[1])


class TeacherForced(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = nn.GRUCell(FEATURES, UNITS), nn.GRUCell(2, UNITS)
        self.out = nn.Linear(UNITS, 2)

    def forward(self, src: Tensor, trg: Tensor, teacher_forcing: float = 0.5) -> Tensor:
        hidden = torch.zeros(src.shape[0], UNITS)
        for frame in src.unbind(1):
            hidden = self.encoder(frame, hidden)
        inp, outs = trg[:, 0], []
        for t in range(1, trg.shape[1]):
            hidden = self.decoder(inp, hidden)
            pred = self.out(hidden)
            outs.append(pred)
            inp = trg[:, t] if float(torch.rand(())) < teacher_forcing else pred
        return torch.stack(outs, 1)


@case(
    TeacherForced,
    expected("cell loop", "encoder", track="encoder", hidden=0),
    expected("cell loop", "decoder", STEPS - 1, track="decoder", hidden=0, inp=0, derived=("inp",)),
    style="Encoder and decoder with teacher forcing by a coin: a prediction may be the next input.",
    inputs=lambda: ((drawn(BATCH, STEPS, FEATURES), drawn(BATCH, STEPS, 2, seed=3)), {}),
    carriable=None,
    resume="the decoder's start is the encoder's end",
    own_start="encoder",
)
def encoder_decoder(model, src, trg, start):
    enc = start(hidden=zeros())
    for t in range(src.shape[1]):
        enc.keep(hidden=gru_step(model.encoder, src[:, t], enc["hidden"]))
    dec = start(hidden=enc["hidden"], inp=trg[:, 0])
    for t in range(1, trg.shape[1]):
        hidden = gru_step(model.decoder, dec["inp"], dec["hidden"])
        dec.keep(hidden=hidden, inp=trg[:, t] if float(torch.rand(())) < 0.5 else model.out(hidden))
    return model.out(dec.along("hidden"))
