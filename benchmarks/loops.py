"""Loops over time written in Python, as they are and accelerated: whole models, forward and backward, in one run.

python benchmarks/loops.py
"""

import math
from functools import partial

import torch
from torch import Tensor, nn

import hiddenstate as hs
from timing import compare, machine

ROWS, STEPS, UNITS = 16, 48, 64


class _Loop(nn.Module):
    """What the models below have in common: an input of 16 features, a state of 64 units, a head on all states."""

    def __init__(self, *sizes: tuple[int, int]) -> None:
        super().__init__()
        self.maps = nn.ModuleList([nn.Linear(*size) for size in sizes])
        self.head = nn.Linear(UNITS, 8)

    def forward(self, x: Tensor) -> Tensor:
        h, outs = x.new_zeros(x.shape[0], UNITS), []
        for t in range(x.shape[1]):
            h = self.step(x[:, t], h)
            outs.append(h)
        return self.head(torch.stack(outs, 1))


class _Elman(_Loop):
    def __init__(self) -> None:
        super().__init__((16, UNITS), (UNITS, UNITS))

    def step(self, x: Tensor, h: Tensor) -> Tensor:
        return torch.tanh(self.maps[0](x) + self.maps[1](h))


class _GRU(_Loop):
    def __init__(self) -> None:
        super().__init__((16 + UNITS, 2 * UNITS), (16 + UNITS, UNITS))

    def step(self, x: Tensor, h: Tensor) -> Tensor:
        r, z = torch.sigmoid(self.maps[0](torch.cat([x, h], 1))).chunk(2, 1)
        return (1 - z) * h + z * torch.tanh(self.maps[1](torch.cat([x, r * h], 1)))


class _Leaky(_Elman):
    def step(self, x: Tensor, h: Tensor) -> Tensor:
        return 0.9 * h + 0.1 * torch.relu(self.maps[0](x) + self.maps[1](h)) + 0.01 * torch.randn_like(h)


class _MinimalGated(_GRU):
    def step(self, x: Tensor, h: Tensor) -> Tensor:
        f = torch.sigmoid(self.maps[0](torch.cat([x, h], 1))[:, :UNITS])
        return (1 - f) * h + f * torch.tanh(self.maps[1](torch.cat([x, f * h], 1)))


class _Highway(_GRU):
    def step(self, x: Tensor, h: Tensor) -> Tensor:
        for _ in range(3):
            gate = torch.sigmoid(self.maps[1](torch.cat([x, h], 1)))
            h = gate * torch.tanh(self.maps[0](torch.cat([x, h], 1))[:, :UNITS]) + (1 - gate) * h
        return h


class _LSTM(_Loop):
    def __init__(self) -> None:
        super().__init__((16, 4 * UNITS), (UNITS, 4 * UNITS))
        self.norm = nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        h = c = x.new_zeros(x.shape[0], UNITS)
        outs = []
        for x_t in x.unbind(1):
            i, f, g, o = self.norm(self.maps[0](x_t) + self.maps[1](h)).chunk(4, 1)
            c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
            h = torch.sigmoid(o) * torch.tanh(c)
            outs.append(h)
        return self.head(torch.stack(outs, 1))


class _NormedLSTM(_LSTM):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(4 * UNITS)


class _Stepped(_Loop):
    def __init__(self, cell: type[nn.Module] = nn.GRUCell) -> None:
        super().__init__()
        self.cell = cell(16, UNITS)

    def forward(self, x: Tensor) -> Tensor:
        state, out = None, x.new_zeros(x.shape[0], x.shape[1], UNITS)
        for t in range(x.shape[1]):
            state = self.cell(x[:, t], state)
            out[:, t] = state[0] if isinstance(state, tuple) else state
        return self.head(out)


class _Stacked(_Loop):
    def __init__(self) -> None:
        super().__init__()
        self.cells = nn.ModuleList([nn.LSTMCell(16, UNITS), nn.LSTMCell(UNITS, UNITS)])

    def forward(self, x: Tensor) -> Tensor:
        zeros, outs = x.new_zeros(x.shape[0], UNITS), []
        states = [(zeros, zeros), (zeros, zeros)]
        for t in range(x.shape[1]):
            inp = x[:, t]
            for place, cell in enumerate(self.cells):
                states[place] = cell(inp, states[place])
                inp = states[place][0]
            outs.append(inp)
        return self.head(torch.stack(outs, 1))


class _Attending(_Loop):
    def __init__(self) -> None:
        super().__init__((16, UNITS), (UNITS, UNITS))
        self.cell = nn.GRUCell(16 + UNITS, UNITS)

    def forward(self, x: Tensor) -> Tensor:
        memory, h, outs = self.maps[0](x), x.new_zeros(x.shape[0], UNITS), []
        for x_t in x.unbind(1):
            weights = torch.softmax((memory @ self.maps[1](h).unsqueeze(2)).squeeze(2) / 8.0, 1)
            h = self.cell(torch.cat([x_t, (weights.unsqueeze(1) @ memory).squeeze(1)], 1), h)
            outs.append(h)
        return self.head(torch.stack(outs, 1))


class _Masked(_Elman):
    def forward(self, x: Tensor) -> Tensor:
        mask, h = x[:, :, 0] > -1, x.new_zeros(x.shape[0], UNITS)
        for t in range(x.shape[1]):
            h = torch.where(mask[:, t : t + 1], self.step(x[:, t], h), h)
        return self.head(h)


MODELS = {
    **{
        kind.__name__[1:]: kind
        for kind in (_Elman, _GRU, _Leaky, _MinimalGated, _Highway, _LSTM, _NormedLSTM, _Stacked, _Attending)
    },
    **{"Masked": _Masked, "GRUCell": _Stepped, "LSTMCell": lambda: _Stepped(nn.LSTMCell)},
}


def train(model: nn.Module, x: Tensor) -> None:
    """Run a model forward and backward."""
    model(x).sum().backward()


def main() -> None:
    """Print a line for each model, and the mean of all ratios."""
    torch.set_num_threads(1)
    print(machine())
    ratios = []
    for name, make in MODELS.items():
        torch.manual_seed(0)
        plain, x = make(), torch.randn(ROWS, STEPS, 16)
        torch.manual_seed(0)
        ours = make()

        with hs.accelerate(ours) as faster:
            train(ours, x)
            rivals = {"as written": partial(train, plain, x), "accelerated": partial(train, ours, x)}
            result = compare(rivals, rounds=15)
            ratios.append(result.ratios["accelerated"])
            low, high = result.spread["accelerated"]
            said = "by the engine" if "by the engine" in faster.explain() else faster.explain()
        print(
            f"{name:14} {1e3 * result.seconds['as written']:8.2f} ms  {1e3 * result.seconds['accelerated']:8.2f} ms  "
            f"x {ratios[-1]:.3f} ({low:.3f} to {high:.3f})  {said}"
        )
    print(f"geometric mean x {math.exp(sum(map(math.log, ratios)) / len(ratios)):.3f}")


if __name__ == "__main__":
    main()
