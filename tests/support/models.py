"""Models as users write them: none knows of this library."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence


class Deep(nn.Module):
    """Two recurrent layers, one of them deep inside, and something around them."""

    def __init__(self, features: int = 3, out: int = 2) -> None:
        super().__init__()
        self.embed = nn.Linear(features, 6)
        self.encoder = nn.ModuleDict({"lstm": nn.LSTM(6, 5, 2, batch_first=True)})
        self.gru = nn.GRU(5, 4, batch_first=True)
        self.head = nn.Linear(4, out)

    def forward(self, x: Tensor) -> Tensor:
        y, _ = self.encoder["lstm"](self.embed(x))
        y, _ = self.gru(y)
        return self.head(y)


def second_version(model: Deep) -> Deep:
    """The same model with another head, so that its states are the same and its outputs are not."""
    with torch.no_grad():
        model.head.weight.neg_()
        model.head.bias.add_(10.0)
    return model


class Stepping(nn.Module):
    """A cell stepped in the model's own loop, which starts without a state."""

    def __init__(self, cell: nn.Module, units: int = 4) -> None:
        super().__init__()
        self.cell = cell
        self.head = nn.Linear(units, 2)

    def forward(self, x: Tensor) -> Tensor:
        state, outs = None, []
        for x_t in x.unbind(1):
            state = self.cell(x_t, state)
            outs.append(state[0] if isinstance(state, tuple) else state)
        return self.head(torch.stack(outs, dim=1))


class Chunked(nn.Module):
    """A fused layer called in a loop over pieces, with the state handed on."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(3, 4, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        state, outs = None, []
        for piece in x.split(2, dim=1):
            out, state = self.lstm(piece, state)
            outs.append(out)
        return torch.cat(outs, dim=1)


class TimeFirst(nn.Module):
    """Torch's default layout: (time, batch, feature)."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.RNN(3, 4, num_layers=2)
        self.head = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        out, h = self.rnn(x)
        return self.head(out), h


class Siamese(nn.Module):
    """One LSTM for two inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.tower = nn.LSTM(3, 4, batch_first=True)

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        return self.tower(a)[0][:, -1] - self.tower(b)[0][:, -1]


class ZerosInside(nn.Module):
    """The tutorial habit: zeros made in forward."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(3, 4, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        zeros = x.new_zeros(1, x.shape[0], 4)
        return self.lstm(x, (zeros, zeros))[0]


class Packed(nn.Module):
    """Takes a packed sequence and gives one back."""

    def __init__(self) -> None:
        super().__init__()
        self.gru = nn.GRU(3, 4)

    def forward(self, x: PackedSequence) -> PackedSequence:
        return self.gru(x)[0]


class OwnLayer(nn.Module):
    """An LSTM from scratch, as people write them: a whole sequence in one call."""

    def __init__(self, input_size: int = 3, hidden_size: int = 4) -> None:
        super().__init__()
        self.input_size, self.hidden_size = input_size, hidden_size
        self.W = nn.Parameter(torch.randn(input_size, 4 * hidden_size) / 2)
        self.U = nn.Parameter(torch.randn(hidden_size, 4 * hidden_size) / 2)

    def forward(
        self, x: Tensor, init_states: tuple[Tensor, Tensor] | None = None
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        batch, steps, _ = x.shape
        h, c = init_states if init_states is not None else (x.new_zeros(batch, self.hidden_size),) * 2
        outs = []
        for t in range(steps):
            i, f, g, o = (x[:, t] @ self.W + h @ self.U).chunk(4, dim=1)
            c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
            h = torch.sigmoid(o) * torch.tanh(c)
            outs.append(h)
        return torch.stack(outs, dim=1), (h, c)


class OwnTimeFirstLayer(nn.Module):
    """A stack from scratch in torch's layout: (time, batch, feature), state (layers, batch, unit)."""

    def __init__(self, input_size: int = 3, hidden_size: int = 4) -> None:
        super().__init__()
        self.input_size, self.hidden_size, self.num_layers = input_size, hidden_size, 2
        self.inner = nn.ModuleList([nn.Linear(input_size, hidden_size), nn.Linear(hidden_size, hidden_size)])
        self.recurrent = nn.ModuleList([nn.Linear(hidden_size, hidden_size) for _ in range(2)])

    def forward(self, x: Tensor, hidden: Tensor | None = None) -> tuple[Tensor, Tensor]:
        if hidden is None:
            hidden = x.new_zeros(2, x.shape[1], self.hidden_size)
        states, outs = list(hidden), []
        for x_t in x:
            for k in range(2):
                x_t = states[k] = torch.tanh(self.inner[k](x_t) + self.recurrent[k](states[k]))
            outs.append(x_t)
        return torch.stack(outs), torch.stack(states)
