"""Nets whose dynamics are known in closed form."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn


class LinearNet(nn.Module):
    """h' = W h + V x."""

    def __init__(self, w: Tensor, v: Tensor | None = None) -> None:
        super().__init__()
        self.w = nn.Parameter(w)
        self.v = nn.Parameter(torch.zeros(len(w), 1, dtype=w.dtype) if v is None else v)
        self.hidden_size, self.input_size = len(w), self.v.shape[1]

    def forward(self, x: Tensor, state: Tensor) -> Tensor:
        return state @ self.w.T + x @ self.v.T


class ChaoticNet(nn.Module):
    """h' = g J tanh(h), with J of independent Gaussian entries."""

    input_size = 1

    def __init__(self, units: int, gain: float, seed: int = 0) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.hidden_size = units
        self.w = nn.Parameter(gain * torch.randn(units, units, generator=generator) / math.sqrt(units))
        self.start = nn.Parameter(torch.randn(units, generator=generator))

    def initial_state(self, batch: int) -> Tensor:
        return self.start.expand(batch, -1)

    def forward(self, x: Tensor, state: Tensor) -> Tensor:
        return torch.tanh(state) @ self.w.T


class FreshMatrices(nn.Module):
    """h' = x h, where the input is a whole matrix, another one at each step."""

    def __init__(self, units: int) -> None:
        super().__init__()
        self.hidden_size, self.input_size = units, units * units

    def forward(self, x: Tensor, state: Tensor) -> Tensor:
        return (x.reshape(len(x), self.hidden_size, self.hidden_size) @ state.unsqueeze(2)).squeeze(2)


class Henon(nn.Module):
    """The Hénon map as a cell that ignores its input."""

    input_size = 1

    def initial_state(self, batch: int) -> Tensor:
        return torch.zeros(batch, 2, dtype=torch.float64)

    def forward(self, x: Tensor, state: Tensor) -> Tensor:
        a, b = state.unbind(1)
        return torch.stack([1 - 1.4 * a * a + b, 0.3 * a], dim=1)


def leaky_integrator(a: float = 0.1, dtype: torch.dtype = torch.float64) -> LinearNet:
    """h' = (1 - a) h + a x."""
    return LinearNet(torch.full((1, 1), 1 - a, dtype=dtype), torch.full((1, 1), a, dtype=dtype))


def delay_line(units: int) -> LinearNet:
    """Unit k holds the input of k steps ago."""
    return LinearNet(torch.diag(torch.ones(units - 1), -1), torch.eye(units)[:, :1])


def ring(units: int, gain: float) -> LinearNet:
    """A delay line that bites its tail, a little weaker each step."""
    return LinearNet(gain * torch.eye(units).roll(1, 0), torch.eye(units)[:, :1])


def gaussian_reservoir(units: int, radius: float = 0.9, seed: int = 0) -> LinearNet:
    """Gaussian weights of a given spectral radius."""
    generator = torch.Generator().manual_seed(seed)
    w = torch.randn(units, units, generator=generator)
    w *= radius / torch.linalg.eigvals(w).abs().max()
    return LinearNet(w, torch.randn(units, 1, generator=generator))


def zeroed(layer: nn.Module) -> nn.Module:
    """The same layer with all weights and biases zero."""
    for weight in layer.parameters():
        nn.init.zeros_(weight)
    return layer


def forgetting(bias: float) -> nn.LSTM:
    """An LSTM without weights, whose forget gate has this bias."""
    lstm = nn.LSTM(1, 3, batch_first=True)
    zeroed(lstm)
    with torch.no_grad():
        lstm.bias_ih_l0[3:6] = bias
    return lstm


def doubling(units: int) -> nn.RNN:
    """h' = tanh(2 h), each unit on its own."""
    rnn = nn.RNN(1, units, bias=False, batch_first=True)
    with torch.no_grad():
        rnn.weight_hh_l0.copy_(2 * torch.eye(units))
    return rnn


def flip_flop(bits: int = 3, units: int = 16, iterations: int = 400) -> nn.RNN:
    """An RNN trained to remember the sign of the last pulse on each of its inputs."""
    generator = torch.Generator().manual_seed(0)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        net, head = nn.RNN(bits, units, batch_first=True), nn.Linear(units, bits)
    optimizer = torch.optim.Adam([*net.parameters(), *head.parameters()], lr=0.01)
    for _ in range(iterations):
        x, y = _pulses(bits, generator)
        loss = (head(net(x)[0]) - y).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return net


def _pulses(bits: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    shape = (32, 25, bits)
    x = (torch.rand(shape, generator=generator) < 0.2) * torch.randint(0, 2, shape, generator=generator).mul(2).sub(1.0)
    x[:, 0] = torch.randint(0, 2, (32, bits), generator=generator).mul(2).sub(1.0)
    y = x.clone()
    for step in range(1, shape[1]):
        y[:, step] = torch.where(x[:, step] != 0, x[:, step], y[:, step - 1])
    return x, y
