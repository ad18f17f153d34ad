"""Small models whose state may not go on into the next call, with a word of the reason."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import dropout, pad
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from .orders import (
    FEATURES,
    UNITS,
    Chunked,
    Layered,
    OwnCell,
    Stepped,
    TwoCells,
    fronted,
    healthy,
    series,
    sick,
    with_lengths,
)

END, ALL, ACROSS, FRONT = "from the end", "all steps", "looks across", "first step"

sick(fronted("flipped", lambda self, x: x.flip(1)), "rnn", END)
sick(fronted("flipped_transposed", lambda self, x: x.transpose(0, 1).flip(0).transpose(0, 1)), "rnn", END)
sick(fronted("descending_index", lambda self, x: x[:, torch.arange(x.shape[1] - 1, -1, -1)]), "rnn", END)
sick(fronted("descending_select", lambda self, x: x.index_select(1, torch.arange(x.shape[1]).flip(0))), "rnn", END)
sick(fronted("turned_list", lambda self, x: torch.stack([self.mix(f) for f in reversed(x.unbind(1))], 1)), "rnn", END)
sick(fronted("centered_over_time", lambda self, x: x - x.mean(1, keepdim=True)), "rnn", ALL)
sick(fronted("differences", lambda self, x: torch.cat([x[:, :1], x[:, 1:] - x[:, :-1]], 1)), "rnn", ACROSS)
sick(fronted("shifted", lambda self, x: torch.cat([torch.zeros_like(x[:, :1]), x[:, :-1]], 1)), "rnn", FRONT)
sick(fronted("with_a_start", lambda self, x: torch.cat([torch.zeros_like(x[:, :1]), x], 1)), "rnn", FRONT)
sick(fronted("attended", lambda self, x: torch.softmax(self.mix(x) @ x.transpose(1, 2), -1) @ x), "rnn", ALL)


class TurnedWithin(Layered):
    """Each row from its own end."""

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        steps = torch.arange(x.shape[1])
        turned = torch.where(steps < lengths[:, None], lengths[:, None] - 1 - steps, steps)
        return self.rnn(x.gather(1, turned[..., None].expand_as(x)))[0]


sick(TurnedWithin, "rnn", END, inputs=with_lengths, carried=False)


class TurnedPacked(Layered):
    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        packed = pack_padded_sequence(x.flip(1), lengths, batch_first=True, enforce_sorted=False)
        return pad_packed_sequence(self.rnn(packed)[0], batch_first=True)[0]


sick(TurnedPacked, "rnn", END, inputs=with_lengths, carried=False)


class TurnedByKeyword(Layered):
    def forward(self, x: Tensor) -> Tensor:
        zeros = x.new_zeros(1, len(x), UNITS)
        return self.rnn(hx=(zeros, zeros), input=x.flip(1))[0]


sick(TurnedByKeyword, "rnn", END)


class Convolved(Layered):
    def __init__(self, left: int) -> None:
        super().__init__()
        self.conv, self.left = nn.Conv1d(FEATURES, FEATURES, 3), left

    def front(self, x: Tensor) -> Tensor:
        return self.conv(pad(x.transpose(1, 2), (self.left, 2 - self.left))).transpose(1, 2)


sick(lambda: Convolved(1), "rnn", ACROSS, name="convolved")
sick(lambda: Convolved(2), "rnn", ACROSS, name="convolved_causally")


class BehindBoth(Layered):
    def __init__(self) -> None:
        super().__init__(2 * UNITS)
        self.both = nn.LSTM(FEATURES, UNITS, batch_first=True, bidirectional=True)

    def front(self, x: Tensor) -> Tensor:
        return self.both(x)[0]


sick(BehindBoth, "rnn", ALL)


class BehindTransformer(Layered):
    def __init__(self) -> None:
        super().__init__()
        self.see = nn.TransformerEncoderLayer(FEATURES, 2, 8, batch_first=True)

    def front(self, x: Tensor) -> Tensor:
        return self.see(x)


sick(BehindTransformer, "rnn", ALL)


class Autoencoder(Layered):
    def __init__(self) -> None:
        super().__init__()
        self.back = nn.GRU(UNITS, FEATURES, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        code = self.rnn(x)[1][0][0]
        return self.back(code[:, None].expand(-1, x.shape[1], -1))[0]


sick(Autoencoder, "back", ALL)


class Backwards(Stepped):
    def frames(self, x: Tensor) -> Any:
        return reversed(x.unbind(1))


sick(Backwards, "cell", END)


class CountingDown(Stepped):
    def frames(self, x: Tensor) -> Any:
        return (x[:, t] for t in range(x.shape[1] - 1, -1, -1))


sick(CountingDown, "cell", END)


class Halved(Stepped):
    def on_the_way(self, h: Tensor, frame: Tensor) -> Tensor:
        return h / 2


sick(Halved, "cell", "not what it gave")


class Residual(Stepped):
    def on_the_way(self, h: Tensor, frame: Tensor) -> Tensor:
        return h + self.mix(frame)


sick(Residual, "cell", "not what it gave")


class Dropped(Stepped):
    def on_the_way(self, h: Tensor, frame: Tensor) -> Tensor:
        return dropout(h, 0.5)


sick(Dropped, "cell", "not what it gave")


class BothHalved(Stepped):
    def forward(self, x: Tensor) -> Tensor:
        state, out = None, []
        for frame in x.unbind(1):
            if state is not None:
                state = (state[0] / 2, state[1] / 2)
            state = self.cell(frame, state)
            out.append(state[0])
        return torch.stack(out, 1)


sick(BothHalved, "cell", "not what it gave")


class Smoothed(Stepped):
    def forward(self, x: Tensor) -> Tensor:
        state, smooth, out = None, x.new_zeros(len(x), UNITS), []
        for frame in x.unbind(1):
            state = self.cell(frame, state)
            smooth = torch.tanh(0.9 * smooth + state[0])
            out.append(smooth)
        return torch.stack(out, 1)


sick(Smoothed, "cell", "smooth crosses beside it")


class Fed(nn.Module):
    """Input feeding: what was attended to goes into the next step."""

    def __init__(self) -> None:
        super().__init__()
        self.step, self.read = nn.GRUCell(FEATURES + UNITS, UNITS), nn.Linear(UNITS, UNITS)

    def forward(self, x: Tensor) -> Tensor:
        h, feed, out = None, x.new_zeros(len(x), UNITS), []
        for frame in x.unbind(1):
            h = self.step(torch.cat([frame, feed], 1), h)
            feed = torch.tanh(self.read(h))
            out.append(feed)
        return torch.stack(out, 1)


sick(Fed, "step", "feed crosses beside it")


class Ahead(OwnCell):
    """Each step also sees the one that comes after it."""

    def forward(self, x: Tensor) -> Tensor:
        level, out, y = None, [], pad(x, (0, 0, 0, 1))
        for t in range(x.shape[1]):
            level = self.step(y[:, t] + y[:, t + 1], level)
            out.append(level)
        return torch.stack(out, 1)


sick(Ahead, "step", ACROSS)


class Started(OwnCell):
    def forward(self, x: Tensor) -> Tensor:
        level, out, frame = None, [], torch.zeros_like(x[:, 0])
        for t in range(x.shape[1]):
            level = self.step(frame, level)
            frame = x[:, t]
            out.append(level)
        return torch.stack(out, 1)


sick(Started, "step", FRONT)


class DrawnWeights(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.LSTM(FEATURES, UNITS, batch_first=True)
        self.raw = nn.Parameter(self.rnn.weight_hh_l0.data.clone())
        del self.rnn._parameters["weight_hh_l0"]
        self.rnn.weight_hh_l0 = self.raw.data

    def forward(self, x: Tensor) -> Tensor:
        self.rnn.weight_hh_l0 = dropout(self.raw, 0.5, self.training)
        return self.rnn(x)[0]


sick(DrawnWeights, "rnn", "drawn anew")
healthy(lambda: DrawnWeights().eval(), name="drawn_weights_evaluating")


class ChunkedFromTheEnd(Chunked):
    def front(self, x: Tensor) -> Tensor:
        return x.flip(1)


sick(ChunkedFromTheEnd, "rnn", END)
sick(fronted("rolled", lambda self, x: x.roll(1, 1)), "rnn", ACROSS)
sick(fronted("summed", lambda self, x: x.cumsum(1)), "rnn", ACROSS)


class ListFromTheEnd(Stepped):
    def forward(self, frames: list[Tensor]) -> Tensor:
        return super().forward(torch.stack(frames[::-1], 1))


sick(ListFromTheEnd, "cell", END, inputs=lambda: ([*series()[0].unbind(1)],), carried=False)


class Zoneout(Stepped):
    def forward(self, x: Tensor) -> Tensor:
        state, out = None, []
        for frame in x.unbind(1):
            h, c = self.cell(frame, state)
            state = (h if state is None else 0.1 * state[0] + 0.9 * h, c)
            out.append(state[0])
        return torch.stack(out, 1)


sick(Zoneout, "cell", "not what it gave")


class Counting(Stepped):
    def forward(self, x: Tensor) -> Tensor:
        state, step, out = None, torch.zeros(()), []
        for frame in x.unbind(1):
            state = self.cell(frame * torch.cos(step), state)
            step = step + 1
            out.append(state[0])
        return torch.stack(out, 1)


sick(Counting, "cell", "crosses beside it")


class OneStartsItself(TwoCells):
    def forward(self, x: Tensor) -> Tensor:
        low, high, out = None, x.new_zeros(len(x), UNITS), []
        for frame in x.unbind(1):
            low = self.low(frame, low)
            high = self.high(low, high)
            out.append(high)
        return torch.stack(out, 1)


sick(OneStartsItself, "low", "the state of high crosses beside it")


class OwnLayer(nn.Module):
    """A layer of one's own, with a state that may be handed in."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden_size, self.mix = UNITS, nn.Linear(FEATURES + UNITS, UNITS)

    def forward(self, x: Tensor, hx: Tensor | None = None) -> tuple[Tensor, Tensor]:
        h, out = x.new_zeros(len(x), UNITS) if hx is None else hx, []
        for frame in x.unbind(1):
            h = torch.tanh(self.mix(torch.cat([frame, h], 1)))
            out.append(h)
        return torch.stack(out, 1), h


class Holder(nn.Module):
    def __init__(self, turned: bool) -> None:
        super().__init__()
        self.rnn, self.turned = OwnLayer(), turned

    def forward(self, x: Tensor) -> Tensor:
        return self.rnn(x.flip(1) if self.turned else x)[0]


sick(lambda: Holder(turned=True), "rnn", END, name="own_layer_from_the_end")
healthy(lambda: Holder(turned=False), name="own_layer")
