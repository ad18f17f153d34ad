"""Users' own cells, one for each way of writing one: every contract is tried on all of them.

`CELLS` maps a name to a `Sample`, which makes the cell and one sequence for it:

    @pytest.mark.parametrize("sample", CELLS.values(), ids=CELLS)
    def test_a_law_of_cells(sample):
        cell, x = sample.cell(), sample.x(batch=3, steps=5)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

INPUT, HIDDEN = 3, 4  # unequal, so that mixing them up fails
TOKENS = 7


class TanhCell(nn.Module):
    """One tensor in, one tensor out: the smallest cell there is."""

    def __init__(self, input_size: int = INPUT, hidden_size: int = HIDDEN) -> None:
        super().__init__()
        self.input_size, self.hidden_size = input_size, hidden_size
        self.inner = nn.Linear(input_size, hidden_size)
        self.recurrent = nn.Linear(hidden_size, hidden_size, bias=False)

    def forward(self, x: Tensor, h: Tensor) -> Tensor:
        return torch.tanh(self.inner(x) + self.recurrent(h))


class PairCell(nn.Module):
    """An LSTM by hand that returns its next state and nothing else."""

    def __init__(self, input_size: int = INPUT, hidden_size: int = HIDDEN) -> None:
        super().__init__()
        self.input_size, self.hidden_size = input_size, hidden_size
        self.gates = nn.Linear(input_size + hidden_size, 4 * hidden_size)

    def forward(self, x: Tensor, state: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        h, c = state
        i, f, g, o = self.gates(torch.cat([x, h], dim=-1)).chunk(4, dim=-1)
        c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
        return torch.sigmoid(o) * torch.tanh(c), c


class LayerNormLSTMCell(nn.Module):
    """What no fused kernel exists for: normalized gates and a normalized cell state; returns (output, state)."""

    def __init__(self, input_size: int = INPUT, hidden_size: int = HIDDEN) -> None:
        super().__init__()
        self.input_size, self.hidden_size = input_size, hidden_size
        self.inner = nn.Linear(input_size, 4 * hidden_size, bias=False)
        self.recurrent = nn.Linear(hidden_size, 4 * hidden_size)
        self.norm_x, self.norm_h = nn.LayerNorm(4 * hidden_size), nn.LayerNorm(4 * hidden_size)
        self.norm_c = nn.LayerNorm(hidden_size)

    def forward(self, x: Tensor, state: tuple[Tensor, Tensor]) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        h, c = state
        gates = self.norm_x(self.inner(x)) + self.norm_h(self.recurrent(h))
        i, f, g, o = gates.chunk(4, dim=-1)
        c = self.norm_c(torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g))
        h = torch.sigmoid(o) * torch.tanh(c)
        return h, (h, c)


class ReadoutCell(nn.Module):
    """An output that is not the state, and of another size."""

    output_size = 5

    def __init__(self, input_size: int = INPUT, hidden_size: int = HIDDEN) -> None:
        super().__init__()
        self.input_size, self.hidden_size = input_size, hidden_size
        self.step = nn.GRUCell(input_size, hidden_size)
        self.read = nn.Linear(hidden_size + input_size, self.output_size)

    def forward(self, x: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.step(x, hidden)
        return self.read(torch.cat([hidden, x], dim=-1)).relu(), hidden


class NestedCell(nn.Module):
    """A nested tuple of three parts of different sizes."""

    def __init__(self, input_size: int = INPUT, hidden_size: int = HIDDEN) -> None:
        super().__init__()
        self.input_size, self.hidden_size = input_size, hidden_size
        self.lstm = nn.LSTMCell(input_size, hidden_size)
        self.slow = nn.Linear(hidden_size, 2)

    def initial_state(self, batch: int) -> tuple[tuple[Tensor, Tensor], Tensor]:
        like = self.slow.weight
        zeros = like.new_zeros(batch, self.hidden_size)
        return (zeros, zeros.clone()), like.new_ones(batch, 2)

    def forward(self, x: Tensor, state: tuple[tuple[Tensor, Tensor], Tensor]) -> tuple[Tensor, object]:
        pair, slow = state
        h, c = self.lstm(x, pair)
        slow = 0.9 * slow + 0.1 * self.slow(h).tanh()
        return h * slow.sum(-1, keepdim=True), ((h, c), slow)


class DictCell(nn.Module):
    """A dict of parts, with a buffer in play and a torch.where."""

    decay: Tensor

    def __init__(self, input_size: int = INPUT, hidden_size: int = HIDDEN) -> None:
        super().__init__()
        self.input_size, self.hidden_size = input_size, hidden_size
        self.inner = nn.Linear(input_size, hidden_size)
        self.recurrent = nn.Linear(hidden_size, hidden_size)
        self.register_buffer("decay", torch.linspace(0.1, 0.9, hidden_size))

    def initial_state(self, batch: int) -> dict[str, Tensor]:
        zeros = self.inner.weight.new_zeros(batch, self.hidden_size)
        return {"voltage": zeros, "trace": zeros.clone()}

    def forward(self, x: Tensor, state: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        voltage = self.decay * state["voltage"] + self.inner(x) + self.recurrent(state["trace"])
        voltage = torch.where(voltage > 0, voltage, 0.1 * voltage)
        trace = torch.tanh(state["trace"] * 0.5 + voltage)
        return trace, {"voltage": voltage, "trace": trace}


class LearnedCell(nn.Module):
    """A first state that is a parameter."""

    def __init__(self, input_size: int = INPUT, hidden_size: int = HIDDEN) -> None:
        super().__init__()
        self.input_size, self.hidden_size = input_size, hidden_size
        self.cell = TanhCell(input_size, hidden_size)
        self.start = nn.Parameter(torch.linspace(-1, 1, hidden_size))

    def initial_state(self, batch: int) -> Tensor:
        return self.start.expand(batch, -1)

    def forward(self, x: Tensor, state: Tensor) -> Tensor:
        return self.cell(x, state)


class MatrixCell(nn.Module):
    """A state of two axes: fast weights that each step writes to and reads from."""

    def __init__(self, input_size: int = INPUT, hidden_size: int = HIDDEN) -> None:
        super().__init__()
        self.input_size, self.hidden_size = input_size, hidden_size
        self.key, self.value = nn.Linear(input_size, hidden_size), nn.Linear(input_size, hidden_size)

    def initial_state(self, batch: int) -> Tensor:
        return self.key.weight.new_zeros(batch, self.hidden_size, self.hidden_size)

    def forward(self, x: Tensor, memory: Tensor) -> tuple[Tensor, Tensor]:
        key, value = self.key(x).softmax(-1), self.value(x)
        memory = 0.8 * memory + key.unsqueeze(2) * value.unsqueeze(1)
        return torch.bmm(key.unsqueeze(1), memory).squeeze(1).tanh(), memory


class StackedCell(nn.Module):
    """A state whose rows are on axis 1, as a stack of layers keeps it."""

    def __init__(self, input_size: int = INPUT, hidden_size: int = HIDDEN) -> None:
        super().__init__()
        self.input_size, self.hidden_size = input_size, hidden_size
        self.first, self.second = nn.GRUCell(input_size, hidden_size), nn.GRUCell(hidden_size, hidden_size)

    def initial_state(self, batch: int) -> Tensor:
        return self.first.weight_ih.new_zeros(2, batch, self.hidden_size)

    def forward(self, x: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        low = self.first(x, state[0])
        high = self.second(low, state[1])
        return high, torch.stack([low, high])


class Memory(NamedTuple):
    """A state with names of its own."""

    key: Tensor
    value: Tensor
    gain: Tensor


class NamedTupleCell(nn.Module):
    """A named tuple of three parts."""

    def __init__(self, input_size: int = INPUT, hidden_size: int = HIDDEN) -> None:
        super().__init__()
        self.input_size, self.hidden_size = input_size, hidden_size
        self.inner = nn.Linear(input_size, hidden_size)
        self.weight = nn.Parameter(torch.randn(hidden_size, hidden_size) / 2)

    def initial_state(self, batch: int) -> Memory:
        zeros = self.weight.new_zeros(batch, self.hidden_size)
        return Memory(zeros, zeros.clone(), self.weight.new_ones(batch, 1))

    def forward(self, x: Tensor, state: Memory) -> tuple[Tensor, Memory]:
        key = torch.tanh(self.inner(x) + state.value @ self.weight)
        value = F.layer_norm(state.value + key * state.gain, (self.hidden_size,))
        return key - value, Memory(key, value, (state.gain * 0.9 + key.mean(-1, keepdim=True)).sigmoid())


class TokenCell(nn.Module):
    """A cell that embeds tokens itself: its input is (batch,) integers."""

    def __init__(self, tokens: int = TOKENS, hidden_size: int = HIDDEN) -> None:
        super().__init__()
        self.hidden_size = hidden_size
        self.embed = nn.Embedding(tokens, INPUT)
        self.step = nn.GRUCell(INPUT, hidden_size)

    def forward(self, token: Tensor, state: Tensor) -> Tensor:
        return self.step(self.embed(token), state)


class LinearCell(nn.Module):
    """No matrix on the state at all: h' = a * h + b(x)."""

    def __init__(self, input_size: int = INPUT, hidden_size: int = HIDDEN) -> None:
        super().__init__()
        self.input_size, self.hidden_size = input_size, hidden_size
        self.inner = nn.Linear(input_size, hidden_size)
        self.forget = nn.Linear(input_size, hidden_size)

    def forward(self, x: Tensor, h: Tensor) -> Tensor:
        keep = torch.sigmoid(self.forget(x))
        return keep * h + (1 - keep) * self.inner(x)


class OutputLast(nn.Module):
    """Returns more than an output beside its state, and not its state last, which is not what a cell returns."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.out = nn.Linear(3, 6), nn.Linear(6, 6), nn.Linear(6, 2)

    def forward(self, x, h):
        h = torch.tanh(self.a(x) + self.b(h))
        return h, self.out(h), h.mean()


@dataclass(frozen=True)
class Sample:
    """A cell with input that fits it."""

    kind: Callable[[], nn.Module]
    parts: tuple[str, ...] = ("h",)
    output: int = HIDDEN
    tokens: bool = False

    def cell(self, dtype: torch.dtype = torch.float64) -> nn.Module:
        """A new cell."""
        return self.kind().to(dtype)

    def x(self, batch: int = 3, steps: int = 5, dtype: torch.dtype = torch.float64) -> Tensor:
        """A sequence for it, (batch, steps, feature), or (batch, steps) of tokens."""
        if self.tokens:
            return torch.randint(TOKENS, (batch, steps))
        return torch.randn(batch, steps, INPUT, dtype=dtype)


CELLS = {
    "tensor": Sample(TanhCell),
    "pair": Sample(PairCell, ("h", "c")),
    "layer norm lstm": Sample(LayerNormLSTMCell, ("h", "c")),
    "readout": Sample(ReadoutCell, output=5),
    "nested": Sample(NestedCell, ("0.0", "0.1", "1")),
    "dict": Sample(DictCell, ("voltage", "trace")),
    "learned": Sample(LearnedCell),
    "matrix": Sample(MatrixCell),
    "stacked": Sample(StackedCell),
    "named tuple": Sample(NamedTupleCell, ("0", "1", "2")),
    "tokens": Sample(TokenCell, tokens=True),
    "linear": Sample(LinearCell),
    "torch rnn cell": Sample(lambda: nn.RNNCell(INPUT, HIDDEN)),
    "torch gru cell": Sample(lambda: nn.GRUCell(INPUT, HIDDEN)),
    "torch lstm cell": Sample(lambda: nn.LSTMCell(INPUT, HIDDEN), ("h", "c")),
}
