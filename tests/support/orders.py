"""Small models whose state may go on into the next call; those whose state may not are in `disorders`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import one_hot, pad
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

ROWS, STEPS, FEATURES, UNITS = 3, 8, 4, 5


@dataclass(frozen=True)
class Ordered:
    """A model with an input; `reason` is what must be said of the layer called `path`, nothing where it is fine."""

    make: Callable[[], nn.Module]
    inputs: Callable[[], tuple[Any, ...]]
    path: str = ""
    reason: str = ""
    axis: int = 1  # of time
    carried: bool = True  # whether `Carry` reaches the layer


HEALTHY: dict[str, Ordered] = {}
SICK: dict[str, Ordered] = {}


def series() -> tuple[Tensor]:
    return (torch.randn(ROWS, STEPS, FEATURES, generator=torch.Generator().manual_seed(1)),)


def tokens() -> tuple[Tensor]:
    return (torch.randint(9, (ROWS, STEPS), generator=torch.Generator().manual_seed(2)),)


def with_lengths() -> tuple[Tensor, Tensor]:
    return (*series(), torch.tensor([STEPS, 3, 5]))


def healthy(make: Callable[[], nn.Module], **more: Any) -> None:
    name = more.pop("name", make.__name__)
    HEALTHY[name] = Ordered(make, more.pop("inputs", series), **more)


def sick(make: Callable[[], nn.Module], path: str, reason: str, **more: Any) -> None:
    name = more.pop("name", make.__name__)
    SICK[name] = Ordered(make, more.pop("inputs", series), path, reason, **more)


class Layered(nn.Module):
    """A layer of torch with something in front."""

    def __init__(self, features: int = FEATURES, **options: Any) -> None:
        super().__init__()
        self.rnn = nn.LSTM(features, UNITS, batch_first=True, **options)
        self.mix = nn.Linear(FEATURES, FEATURES)

    def front(self, x: Tensor) -> Tensor:
        return x

    def forward(self, x: Tensor) -> Tensor:
        return self.rnn(self.front(x))[0]


class Stepped(nn.Module):
    """A cell of torch in a loop."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.mix = nn.LSTMCell(FEATURES, UNITS), nn.Linear(FEATURES, UNITS)

    def frames(self, x: Tensor) -> Any:
        return x.unbind(1)

    def on_the_way(self, h: Tensor, frame: Tensor) -> Tensor:
        return h

    def forward(self, x: Tensor) -> Tensor:
        state, out = None, []
        for frame in self.frames(x):
            h, c = self.cell(frame, state)
            state = (self.on_the_way(h, frame), c)
            out.append(h)
        return torch.stack(out, 1)


def fronted(name: str, front: Callable[[Any, Tensor], Tensor]) -> type[Layered]:
    return type(name, (Layered,), {"front": front})


healthy(Layered)
healthy(Stepped)
healthy(fronted("projected", lambda self, x: torch.relu(self.mix(x)) + x))
healthy(fronted("flipped_twice", lambda self, x: self.mix(x.flip(1)).flip(1)))
healthy(fronted("turned_lists_twice", lambda self, x: torch.stack(list(reversed(list(reversed(x.unbind(1))))), 1)))
healthy(fronted("features_flipped", lambda self, x: x.flip(2)))
healthy(fronted("rows_flipped", lambda self, x: x.flip(0).flip(0)))
healthy(fronted("over_features", lambda self, x: (x - x.mean(-1, keepdim=True)) / x.std(-1, keepdim=True)))
healthy(fronted("gathered_in_order", lambda self, x: x.index_select(1, torch.arange(x.shape[1]))))
healthy(fronted("padded_features", lambda self, x: pad(x[..., 1:], (1, 0))))


class Embedded(Layered):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm, self.drop = nn.Embedding(9, FEATURES), nn.LayerNorm(FEATURES), nn.Dropout(0.5)

    def front(self, x: Tensor) -> Tensor:
        return self.drop(self.norm(self.embed(x)))


healthy(Embedded, inputs=tokens)
healthy(lambda: Embedded().eval(), inputs=tokens, name="embedded_evaluating")


class OneHot(Layered):
    def front(self, x: Tensor) -> Tensor:
        return one_hot(x, 9).float()


healthy(lambda: OneHot(9), inputs=tokens, name="one_hot")


class Written(Layered):
    def front(self, x: Tensor) -> Tensor:
        new = torch.zeros_like(x)
        for t in range(x.shape[1]):
            new[:, t] = self.mix(x[:, t])
        return new


healthy(Written)


class Normed(Layered):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(FEATURES)

    def front(self, x: Tensor) -> Tensor:
        return self.norm(x.transpose(1, 2)).transpose(1, 2)


healthy(Normed)
healthy(lambda: Normed().eval(), name="normed_evaluating")


class TimeFirst(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.GRU(FEATURES, UNITS)

    def forward(self, x: Tensor) -> Tensor:
        return self.rnn(x.transpose(0, 1).contiguous())[0].transpose(0, 1)


healthy(TimeFirst)


class Unbatched(Layered):
    def forward(self, x: Tensor) -> Tensor:
        return self.rnn(self.mix(x))[0]


healthy(Unbatched, inputs=lambda: (series()[0][0],), axis=0)


class Packed(Layered):
    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        packed = pack_padded_sequence(self.mix(x), lengths, batch_first=True, enforce_sorted=False)
        return pad_packed_sequence(self.rnn(packed)[0], batch_first=True)[0]


healthy(Packed, inputs=with_lengths, carried=False)


class ByKeyword(Packed):
    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        zeros = x.new_zeros(1, len(x), UNITS)
        return pad_packed_sequence(self.rnn(hx=(zeros, zeros), input=packed)[0], batch_first=True)[0]


healthy(ByKeyword, inputs=with_lengths, carried=False)


class Stacked(Layered):
    def __init__(self) -> None:
        super().__init__()
        self.low, self.high = nn.GRU(FEATURES, FEATURES, batch_first=True), nn.RNN(UNITS, FEATURES, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        y = self.low(x)[0] + x
        return self.high(self.rnn(y)[0])[0] + y


healthy(Stacked)


class Frames(Layered):
    def front(self, x: Tensor) -> Tensor:
        return x.reshape(x.shape[0], -1, 2 * FEATURES)


healthy(lambda: Frames(2 * FEATURES), name="frames_put_together")


class Pictures(Layered):
    def __init__(self) -> None:
        super().__init__()
        self.see = nn.Conv2d(2, FEATURES, 3)

    def front(self, x: Tensor) -> Tensor:
        return self.see(x.flatten(0, 1)).mean((2, 3)).unflatten(0, x.shape[:2])


healthy(Pictures, inputs=lambda: (torch.randn(ROWS, STEPS, 2, 5, 5),))


class ChannelsFirst(Layered):
    def __init__(self) -> None:
        super().__init__()
        self.widen = nn.Conv1d(FEATURES, FEATURES, 1)

    def front(self, x: Tensor) -> Tensor:
        return self.widen(x).transpose(1, 2)


healthy(ChannelsFirst, inputs=lambda: (series()[0].transpose(1, 2),), axis=2, carried=False)


class Translator(nn.Module):
    """Encoder and decoder with teacher forcing, attention on the encoder's steps in front of the decoder."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.GRU(FEATURES, UNITS, batch_first=True, bidirectional=True)
        self.decoder = nn.GRU(2 * UNITS + FEATURES, UNITS, batch_first=True)
        self.ask = nn.Linear(FEATURES, 2 * UNITS)

    def forward(self, src: Tensor, tgt: Tensor) -> Tensor:
        memory, h = self.encoder(src)
        seen = torch.softmax(self.ask(tgt) @ memory.transpose(1, 2), -1) @ memory
        return self.decoder(torch.cat([tgt, seen], -1), h[:1])[0]


healthy(Translator, inputs=lambda: (*series(), torch.randn(ROWS, 6, FEATURES)), carried=False)


class TwoCells(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.low, self.high = nn.GRUCell(FEATURES, UNITS), nn.GRUCell(UNITS, UNITS)

    def forward(self, x: Tensor) -> Tensor:
        low, high, out = None, None, []
        for t in range(x.shape[1]):
            low = self.low(x[:, t], low)
            high = self.high(torch.dropout(low, 0.3, self.training), high)
            out.append(high)
        return torch.stack(out, 1)


healthy(TwoCells)


class Cut(Stepped):
    def on_the_way(self, h: Tensor, frame: Tensor) -> Tensor:
        return h.detach().clone()


healthy(Cut)


class Loss(Stepped):
    """A sum beside the cell that only collects."""

    def forward(self, x: Tensor) -> Tensor:
        state, total, out = None, torch.zeros(()), []
        for frame in x.unbind(1):
            state = self.cell(frame, state)
            total = total + state[0].square().mean()
            out.append(state[0])
        self.penalty = total
        return torch.stack(out, 1)


healthy(Loss)


class MaskedBefore(Stepped):
    """A mask in front of every step, the first one too."""

    def forward(self, x: Tensor) -> Tensor:
        h, out = x.new_zeros(len(x), UNITS), []
        c = h
        for frame in x.unbind(1):
            keep = (frame[:, :1] > -1).float()
            h, c = self.cell(frame, (h * keep, c * keep))
            out.append(h)
        return torch.stack(out, 1)


healthy(MaskedBefore, carried=False)


class Step(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(FEATURES + UNITS, UNITS)

    def forward(self, x: Tensor, level: Tensor | None = None) -> Tensor:
        return torch.tanh(self.mix(torch.cat([x, x.new_zeros(len(x), UNITS) if level is None else level], 1)))


class OwnCell(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.step, self.mix = Step(), nn.Linear(FEATURES, FEATURES)

    def forward(self, x: Tensor) -> Tensor:
        level, out = None, []
        for frame in self.mix(x).unbind(1):
            level = self.step(frame, level)
            out.append(level)
        return torch.stack(out, 1)


healthy(OwnCell)


class Chunked(Layered):
    def forward(self, x: Tensor) -> Tensor:
        state, out = None, []
        for chunk in self.front(x).split(2, 1):
            y, state = self.rnn(chunk, state)
            out.append(y)
        return torch.cat(out, 1)


healthy(Chunked)


class PackedByTokens(Embedded):
    """Lengths are read off the tokens, and rows are sorted by them."""

    def forward(self, x: Tensor) -> Tensor:
        lengths, order = (x != 0).sum(1).sort(descending=True)
        packed = pack_padded_sequence(self.embed(x[order]), lengths, batch_first=True)
        return pad_packed_sequence(self.rnn(packed)[0], batch_first=True)[0][order.argsort()]


healthy(
    PackedByTokens,
    inputs=lambda: (torch.tensor([[1, 2, 3, 4, 5, 6, 7, 8], [3, 4, 5, 6, 0, 0, 0, 0], [8, 7, 6, 5, 4, 3, 0, 0]]),),
    carried=False,
)


class Hub(nn.Module):
    """Words of letters: a layer within each word, and one along the words."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.word = nn.Embedding(9, FEATURES), nn.GRU(FEATURES, FEATURES, batch_first=True)
        self.rnn = nn.LSTM(FEATURES, UNITS, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        words = self.word(self.embed(x).flatten(0, 1))[1][-1]
        return self.rnn(words.unflatten(0, x.shape[:2]))[0]


healthy(Hub, inputs=lambda: (torch.randint(9, (ROWS, STEPS, 6)),), name="words_of_letters", carried=False)
