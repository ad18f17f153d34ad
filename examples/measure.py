"""What a net has learned, in numbers: a flip-flop that keeps three bits, before and after training.

Three inputs carry pulses of +1 and -1, now and then; three outputs repeat the last pulse of each. Whoever solves this
must hold eight states apart for as long as no pulse comes: the trained net has eight stable fixed points.
"""

from __future__ import annotations

import argparse

import torch
from torch import Tensor, nn

import hiddenstate as hs

BITS, UNITS = 3, 24


def main() -> None:
    """Measure, train, measure again."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--updates", type=int, default=600)
    settings = parser.parse_args()
    torch.manual_seed(0)
    net, head = nn.RNN(BITS, UNITS, batch_first=True), nn.Linear(UNITS, BITS)
    describe("before training", net)
    train(net, head, settings.updates)
    describe("after training", net)


def describe(title: str, net: nn.RNN) -> None:
    """Print one line for each measure."""
    x, y = pulses(256, 60)
    with hs.record(net) as recording:
        net(x)
    track = recording["l0"]
    first_bit = hs.measure.probe(track, y[..., 0] > 0)
    silence = torch.zeros(1, 400, BITS)
    print(f"\n{title}")
    print("  saturation   ", hs.measure.saturation(track))
    print("  dimension    ", hs.measure.dimension(track))
    print("  memory       ", hs.measure.memory(net, x[:32]))
    print("  first bit    ", first_bit)
    print("  exponents    ", hs.measure.lyapunov(net, silence, state=track.h[:1, -1], k=3))
    print("  fixed points ", str(hs.measure.fixed_points(net)).splitlines()[0])


def train(net: nn.RNN, head: nn.Linear, updates: int) -> None:
    """Teach the net to hold the last pulse of each input."""
    optimizer = torch.optim.Adam([*net.parameters(), *head.parameters()], lr=0.01)
    for _ in range(updates):
        x, y = pulses(32, 25)
        loss = (head(net(x)[0]) - y).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(f"\n{updates} updates: the squared error is {loss.item():.4f}")


def pulses(batch: int, steps: int) -> tuple[Tensor, Tensor]:
    """Inputs with a pulse in one of five steps, and the last pulse at every step."""
    x = (torch.rand(batch, steps, BITS) < 0.2) * torch.randint(0, 2, (batch, steps, BITS)).mul(2).sub(1.0)
    x[:, 0] = torch.randint(0, 2, (batch, BITS)).mul(2).sub(1.0)
    y = x.clone()
    for step in range(1, steps):
        y[:, step] = torch.where(x[:, step] != 0, x[:, step], y[:, step - 1])
    return x, y


if __name__ == "__main__":
    main()
