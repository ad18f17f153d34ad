"""What carrying costs: the same stateful training loop, written by hand and with Carry.

Batch 32, 35 steps, two layers of LSTM 256, forward and backward and update. Carried over hand-written is to be <= 1.03,
a stepped cell <= 1.12, and forward and backward <= 1.3 where what a loop starts from is replaced.
"""

from functools import partial
from time import perf_counter, process_time

import torch
from torch import nn

import hiddenstate as hs
from timing import compare

CLOCK = perf_counter if torch.cuda.is_available() else process_time  # other work on the machine does not count


class Model(nn.Module):
    """A language model as people write them."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(1000, 256)
        self.lstm = nn.LSTM(256, 256, num_layers=2, batch_first=True)
        self.head = nn.Linear(256, 1000)

    def forward(self, tokens: torch.Tensor, state: tuple | None = None) -> tuple[torch.Tensor, tuple]:
        """Return logits and the state."""
        out, state = self.lstm(self.embed(tokens), state)
        return self.head(out), state


def update(model: nn.Module, optimizer: torch.optim.Optimizer, out: torch.Tensor, y: torch.Tensor) -> None:
    """Take one step of training."""
    nn.functional.cross_entropy(out.flatten(0, 1), y.flatten()).backward()
    optimizer.step()
    optimizer.zero_grad()


class OwnStart(nn.Module):
    """A model that makes its own start, and hands it to a layer."""

    def __init__(self, units: int) -> None:
        super().__init__()
        self.lstm, self.units = nn.LSTM(64, units, batch_first=True), units

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the states along time."""
        h = x.new_zeros(1, len(x), self.units)
        return self.lstm(x, (h, h))[0]


class OwnLoop(nn.Module):
    """A GRU written out, from zeros."""

    def __init__(self, units: int) -> None:
        super().__init__()
        self.inner, self.outer, self.units = nn.Linear(64, 3 * units), nn.Linear(units, 3 * units), units

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the states along time."""
        h, out = x.new_zeros(len(x), self.units), []
        for frame in x.unbind(1):
            (a, b, c), (d, e, f) = self.inner(frame).chunk(3, 1), self.outer(h).chunk(3, 1)
            r, z = torch.sigmoid(a + d), torch.sigmoid(b + e)
            h = (1 - z) * torch.tanh(c + r * f) + z * h
            out.append(h)
        return torch.stack(out, 1)


class OwnDecoder(nn.Module):
    """A cell with attention, from zeros: what the cell is handed is read by attention too."""

    def __init__(self, units: int) -> None:
        super().__init__()
        self.cell, self.keys, self.units = nn.GRUCell(64 + units, units), nn.Parameter(torch.randn(16, units)), units

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the states along time."""
        h, out = x.new_zeros(len(x), self.units), []
        for frame in x.unbind(1):
            context = torch.softmax(h @ self.keys.T, -1) @ self.keys
            h = self.cell(torch.cat([frame, context], -1), h)
            out.append(h)
        return torch.stack(out, 1)


def learn(model: nn.Module, x: torch.Tensor) -> None:
    """Run a model forward and backward."""
    model(x).square().mean().backward()


def time_own_starts() -> None:
    """Time models whose own start gives way to the carried state, against the same models as they are."""
    for kind, units in ((OwnStart, 256), (OwnLoop, 256), (OwnDecoder, 256), (OwnLoop, 32)):
        plain, carried, x = kind(units), kind(units), torch.randn(32, 35, 64)
        carry = hs.Carry(carried, override=True)
        for _ in range(4):  # watched, proven and tapped
            learn(carried, x)
        runs = {
            f"{kind.__name__} {units}": partial(learn, plain, x),
            "its start overridden": partial(learn, carried, x),
        }
        print(compare(runs, rounds=41, clock=CLOCK))
        carry.close()


def main() -> None:
    """Time a fused layer in training, and a cell at every step."""
    torch.manual_seed(0)
    tokens = torch.randint(1000, (32, 36))
    x, y = tokens[:, :-1], tokens[:, 1:]
    models = [Model(), Model()]
    optimizers = [torch.optim.SGD(model.parameters(), 0.01) for model in models]
    carry = hs.Carry(models[1])
    state = None

    def by_hand() -> None:
        nonlocal state
        out, state = models[0](x, state)
        state = tuple(part.detach() for part in state)
        update(models[0], optimizers[0], out, y)

    def carried() -> None:
        out, _ = models[1](x)
        update(models[1], optimizers[1], out, y)

    print(compare({"by hand": by_hand, "carried": carried}, rounds=41, clock=CLOCK))
    carry.close()
    cells = nn.LSTMCell(256, 256), nn.LSTMCell(256, 256)
    steps = torch.randn(35, 32, 256)
    carry = hs.Carry(cells[1])

    def cell_by_hand() -> None:
        state = None
        for x_t in steps:
            state = cells[0](x_t, state)

    def cell_carried() -> None:
        carry.reset()
        for x_t in steps:
            cells[1](x_t)

    with torch.no_grad():
        rivals = {"cell by hand": cell_by_hand, "cell carried at every step": cell_carried}
        print(compare(rivals, rounds=41, clock=CLOCK))
    time_own_starts()


if __name__ == "__main__":
    main()
