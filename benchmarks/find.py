"""What it costs to find recurrence by watching one call, and to record what only watching shows.

Finding is done once, and is to take at most 5 s at 2,048 steps. A cell is listened to afterwards; a loop without a
module that is the step is watched anew in every recorded call, which is to cost at most x 1.3 of forward and backward.
"""

import time
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

import hiddenstate as hs
from timing import compare


class Loop(nn.Module):
    """A loop over time as people write it, with its state in a variable."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.mix = nn.Linear(2 * size, size)
        self.size = size

    def forward(self, x: Tensor) -> Tensor:
        """Return all states."""
        h, out = x.new_zeros(len(x), self.size), []
        for step in x.unbind(1):
            h = torch.tanh(self.mix(torch.cat([step, h], -1)))
            out.append(h)
        return torch.stack(out, 1)


class Step(nn.Module):
    """A cell of one's own: an LSTM, written out."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.mix = nn.Linear(2 * size, 4 * size)

    def forward(self, x: Tensor, state: tuple[Tensor, Tensor]) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """Return the output and the next state."""
        h, c = state
        i, f, g, o = self.mix(torch.cat([x, h], -1)).chunk(4, -1)
        c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
        h = torch.sigmoid(o) * torch.tanh(c)
        return h, (h, c)


class Stepped(nn.Module):
    """A model that steps such a cell."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.cell, self.size = Step(size), size

    def forward(self, x: Tensor) -> Tensor:
        """Return all outputs."""
        zeros = x.new_zeros(len(x), self.size)
        state, out = (zeros, zeros), []
        for step in x.unbind(1):
            y, state = self.cell(step, state)
            out.append(y)
        return torch.stack(out, 1)


class Fused(nn.Module):
    """A model around one of torch's own layers."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.lstm, self.head = nn.LSTM(size, size, batch_first=True), nn.Linear(size, size)

    def forward(self, x: Tensor) -> Tensor:
        """Return all outputs."""
        return self.head(self.lstm(x)[0])


MODELS: dict[str, Callable[[int], nn.Module]] = {"a loop": Loop, "a cell of one's own": Stepped, "nn.LSTM": Fused}
SIZES = [(8, 128, 64), (8, 2048, 64), (1, 2048, 128), (32, 512, 256)]  # rows, steps, units


def trained(model: nn.Module, x: Tensor) -> None:
    """Run forward and backward."""
    model(x).square().mean().backward()


def main() -> None:
    """Time finding against the plain call, and recording once all is found, on the processor's own clock."""
    torch.manual_seed(0)
    for name, make in MODELS.items():
        for rows, steps, units in SIZES:
            x = torch.randn(rows, steps, units)
            model, watched = make(units), make(units)
            assert len(hs.layers(model, x)) == 1
            finding: dict[str, Callable[[], object]] = {
                "forward": partial(model, x),
                "hs.layers": partial(hs.layers, model, x),
            }
            recording: dict[str, Callable[[], object]] = {
                "forward and backward": partial(trained, model, x),
                "recorded, after the first call": partial(trained, watched, x),
            }
            print(f"-- {name}: {rows} rows, {steps} steps, {units} units")
            with torch.no_grad():
                print(compare(finding, rounds=5, warmup=1, clock=time.process_time))
            with hs.record(watched):
                print(compare(recording, rounds=5, warmup=1, clock=time.process_time))


if __name__ == "__main__":
    main()
