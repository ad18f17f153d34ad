"""Measures against the plain ways of getting the same numbers: a loop of single trials, autograd step by step.

    python benchmarks/measure.py

Both sides of every table compute the same thing, which is checked before the clock starts.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn

import hiddenstate as hs
from timing import compare, machine

TRIALS, STEPS, UNITS = 50, 100, 32


class Scorer(nn.Module):
    """A sequence to one score."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer
        self.head = nn.Linear(UNITS, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Return the score after the last step."""
        return self.head(self.layer(x)[0][:, -1])


class Tanh(nn.Module):
    """A cell of one's own, for which no closed form is known."""

    def __init__(self, input_size: int, hidden_size: int) -> None:
        super().__init__()
        self.input_size, self.hidden_size = input_size, hidden_size
        self.inner = nn.Linear(input_size, hidden_size)
        self.recurrent = nn.Linear(hidden_size, hidden_size)

    def forward(self, x: Tensor, h: Tensor) -> Tensor:
        """Return the next state."""
        return torch.tanh(self.inner(x) + self.recurrent(h))


class Loop(nn.Module):
    """A cell along time, as people write it."""

    def __init__(self, cell: nn.Module) -> None:
        super().__init__()
        self.cell = cell

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return all states and the last."""
        h, steps = x.new_zeros(len(x), UNITS), []
        for step in x.unbind(1):
            h = self.cell(step, h)
            steps.append(h)
        return torch.stack(steps, dim=1), h


def single_trials(model: nn.Module, x: Tensor) -> Tensor:
    """The curve of memory, one sequence after the other, one backward for each unit of the last output."""
    curves = []
    for row in x:
        leaf = row.unsqueeze(0).requires_grad_()
        last = model(leaf)
        last = last[0][:, -1] if isinstance(last, tuple) else last
        squares = torch.zeros(len(row))
        for unit in range(last.shape[1]):
            (gradient,) = torch.autograd.grad(last[0, unit], leaf, retain_graph=True)
            squares += gradient[0].square().sum(1)
        curves.append(squares.sqrt().flip(0))
    return torch.stack(curves).mean(0)


def by_autograd(layer: nn.Module, x: Tensor) -> Tensor:
    """The Jacobian at each step, by torch's own function for it."""
    found, state = [], torch.zeros(1, layer.hidden_size)
    for step in x[0]:

        def advance(h: Tensor, step: Tensor = step) -> Tensor:
            result = layer(step.unsqueeze(0), h)
            return result[1] if isinstance(result, tuple) else result

        found.append(torch.autograd.functional.jacobian(advance, state)[0, :, 0])
        state = advance(state).detach()
    return torch.stack(found)


def table(title: str, plain: Callable[[], Tensor], ours: Callable[[], Tensor], *, rounds: int) -> None:
    """Check that both give the same, then time them in turn."""
    torch.testing.assert_close(ours(), plain(), rtol=1e-3, atol=1e-5)
    found = compare({"hiddenstate": ours, "the plain way": plain}, rounds=rounds, warmup=1)
    print(f"\n{title}\n{str(found).partition(chr(10))[2]}")


def main() -> None:
    """Print one table for each measure."""
    torch.manual_seed(0)
    print(machine())
    x = torch.randn(TRIALS, STEPS, 8)
    layers = {
        "nn.RNN": nn.RNN(8, UNITS, batch_first=True),
        "nn.GRU": nn.GRU(8, UNITS, batch_first=True),
        "nn.LSTM": nn.LSTM(8, UNITS, batch_first=True),
        "a cell in a loop": Loop(Tanh(8, UNITS)),
    }
    for name, layer in layers.items():
        table(
            f"memory: {name}, all {UNITS} outputs, {TRIALS} trials of {STEPS} steps",
            lambda layer=layer: single_trials(layer, x),
            lambda layer=layer: hs.measure.memory(layer, x, time_axis=1).curve,
            rounds=3,
        )
    for name, layer in layers.items():
        model = Scorer(layer)
        table(
            f"memory: a model of {name} with one score, {TRIALS} trials of {STEPS} steps",
            lambda model=model: single_trials(model, x),
            lambda model=model: hs.measure.memory(model, x).curve,
            rounds=9,
        )
    x = torch.randn(1, 200, 16)
    for name, layer in {"nn.RNN": nn.RNN(16, 256), "a cell of one's own": Tanh(16, 256)}.items():
        table(
            f"Jacobians: {name}, 256 units, 200 steps",
            lambda layer=layer: by_autograd(layer, x),
            lambda layer=layer: hs.measure.jacobians(layer, x, time_axis=1).values[0],
            rounds=3,
        )


if __name__ == "__main__":
    main()
