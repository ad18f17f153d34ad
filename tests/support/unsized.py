"""Cells as people write them who never heard of `hidden_size`, and how each is made to say it.

`STYLES` maps a name to a class; `sized(cell)` is the same cell with a `hidden_size`, which every tool knows how to
take: whatever a tool says of the one it has to say of the other.
"""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn

INPUT, UNITS = 3, 6


class _Tanh(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(INPUT, UNITS), nn.Linear(UNITS, UNITS)

    def forward(self, x: Tensor, h: Tensor) -> Tensor:
        return torch.tanh(self.a(x) + self.b(h))


class InitHidden(_Tanh):
    def init_hidden(self, batch: int) -> Tensor:
        return torch.zeros(batch, UNITS)


class InitHiddenOfOne(_Tanh):
    def initHidden(self) -> Tensor:  # as in torch's tutorial
        return torch.zeros(1, UNITS)


class Nothing(_Tanh):
    pass


class HiddenDim(_Tanh):
    def __init__(self) -> None:
        super().__init__()
        self.input_dim, self.hidden_dim = INPUT, UNITS


class Units(_Tanh):
    def __init__(self) -> None:
        super().__init__()
        self.n_in, self.units, self.seed, self.flag = INPUT, UNITS, 17, True


class BareWeights(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.Wxh = nn.Parameter(torch.randn(INPUT, UNITS) * 0.4)
        self.Whh = nn.Parameter(torch.randn(UNITS, UNITS) * 0.4)
        self.bh = nn.Parameter(torch.zeros(UNITS))

    def forward(self, inputs: Tensor, hprev: Tensor) -> Tensor:
        return torch.tanh(inputs @ self.Wxh + hprev @ self.Whh + self.bh)


class WithOutput(nn.Module):
    """As in torch's tutorial on names: input and state side by side, an output beside the state."""

    def __init__(self) -> None:
        super().__init__()
        self.i2h, self.h2o = nn.Linear(INPUT + UNITS, UNITS), nn.Linear(UNITS, 2)

    def forward(self, input: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        hidden = torch.tanh(self.i2h(torch.cat((input, hidden), 1)))
        return self.h2o(hidden), hidden

    def init_hidden(self, batch_size: int, device: torch.device | None = None) -> Tensor:
        return torch.zeros(batch_size, UNITS, device=device)


class Gru(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.n_hidden = UNITS
        self.x2h, self.h2h = nn.Linear(INPUT, 3 * UNITS), nn.Linear(UNITS, 3 * UNITS)

    def forward(self, x: Tensor, prev_h: Tensor) -> Tensor:
        (xr, xz, xn), (hr, hz, hn) = self.x2h(x).chunk(3, -1), self.h2h(prev_h).chunk(3, -1)
        r, z = torch.sigmoid(xr + hr), torch.sigmoid(xz + hz)
        return (1 - z) * torch.tanh(xn + r * hn) + z * prev_h


class Lstm(nn.Module):
    """One product for all gates; the state is a pair."""

    def __init__(self) -> None:
        super().__init__()
        self.gates = nn.Linear(INPUT + UNITS, 4 * UNITS)

    def forward(self, x: Tensor, state: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        h, c = state
        i, f, g, o = self.gates(torch.cat([x, h], -1)).chunk(4, -1)
        c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
        return torch.sigmoid(o) * torch.tanh(c), c


class LstmWithOutput(Lstm):
    def forward(self, x: Tensor, state: tuple[Tensor, Tensor]) -> tuple[Tensor, tuple[Tensor, Tensor]]:  # type: ignore[override]
        h, c = super().forward(x, state)
        return h, (h, c)

    def init_state(self, batch: int) -> tuple[Tensor, Tensor]:
        return torch.zeros(batch, UNITS), torch.zeros(batch, UNITS)


class SpreadLstm(Lstm):
    """The state in two arguments."""

    def forward(self, x: Tensor, h: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        return super().forward(x, (h, c))


class SpreadLstmWithStart(SpreadLstm):
    def init_hidden(self, batch: int) -> tuple[Tensor, Tensor]:
        return torch.zeros(batch, UNITS), torch.zeros(batch, UNITS)


class Tokens(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.b = nn.Embedding(7, UNITS), nn.Linear(UNITS, UNITS)

    def forward(self, token: Tensor, hidden: Tensor) -> Tensor:
        return torch.tanh(self.table(token) + self.b(hidden))


class OptionalState(_Tanh):
    def forward(self, x: Tensor, h: Tensor | None = None) -> Tensor:
        return super().forward(x, x.new_zeros(len(x), UNITS) if h is None else h)


class OddNames(_Tanh):
    def forward(self, inp: Tensor, z: Tensor) -> Tensor:
        return super().forward(inp, z)


class Normed(_Tanh):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(UNITS)

    def forward(self, x: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        hidden = self.norm(super().forward(x, hidden))
        return hidden, hidden


class AroundGru(nn.Module):
    """Adds to what a cell of torch's does."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.cell = nn.LayerNorm(INPUT), nn.GRUCell(INPUT, UNITS)

    def forward(self, x: Tensor, h: Tensor) -> Tensor:
        return self.cell(self.norm(x), h)


STYLES = {
    kind.__name__: kind
    for kind in (InitHidden, InitHiddenOfOne, Nothing, HiddenDim, Units, BareWeights, WithOutput, Gru, Lstm)
} | {kind.__name__: kind for kind in (LstmWithOutput, SpreadLstm, SpreadLstmWithStart, Tokens)}
STYLES |= {kind.__name__: kind for kind in (OptionalState, OddNames, Normed, AroundGru)}
SPREAD = ("SpreadLstm", "SpreadLstmWithStart")


def made(style: str) -> nn.Module:
    """Return a cell of a style, the same one each time."""
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return STYLES[style]()


def sized(cell: nn.Module) -> nn.Module:
    """Return the same cell, which says how large its state is."""
    twin = copy.deepcopy(cell)
    twin.hidden_size = UNITS
    return twin


def sequence(style: str, rows: int = 4, steps: int = 12) -> Tensor:
    """Return a sequence that a cell of this style is stepped along."""
    generator = torch.Generator().manual_seed(5)
    if style == "Tokens":
        return torch.randint(7, (rows, steps), generator=generator)
    return torch.randn(rows, steps, INPUT, generator=generator)
