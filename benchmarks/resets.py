"""Rows that start anew in mid-sequence, on a fused layer: packed into one call, or stepped through in a loop.

python benchmarks/resets.py
"""

import torch
from torch import nn

import hiddenstate as hs
from timing import compare

BATCH, STEPS, HIDDEN, SHARE = 32, 256, 256, 0.05


def stepped(layer: nn.LSTM, x: torch.Tensor, resets: torch.Tensor) -> torch.Tensor:
    """What one writes by hand: the layer called once for each step, its state wiped where a row starts anew."""
    state = tuple(x.new_zeros(1, BATCH, HIDDEN) for _ in range(2))
    outputs = []
    for step, anew in zip(x.unbind(1), resets.unbind(1), strict=True):
        state = tuple(part.masked_fill(anew[None, :, None], 0.0) for part in state)
        out, state = layer(step.unsqueeze(1), state)
        outputs.append(out)
    return torch.cat(outputs, dim=1)


def main() -> None:
    """Print one table for the forward pass, and one with the backward pass."""
    torch.manual_seed(0)
    layer = nn.LSTM(HIDDEN, HIDDEN, batch_first=True)
    x, resets = torch.randn(BATCH, STEPS, HIDDEN), torch.rand(BATCH, STEPS) < SHARE
    torch.testing.assert_close(hs.unroll(layer, x, resets=resets)[0], stepped(layer, x, resets))
    rivals = {
        "step loop": lambda: stepped(layer, x, resets),
        "hs.unroll(resets=)": lambda: hs.unroll(layer, x, resets=resets)[0],
        "no resets at all": lambda: layer(x)[0],
    }
    with torch.no_grad():
        print(f"forward, batch {BATCH}, {STEPS} steps, hidden {HIDDEN}, {SHARE:.0%} resets")
        print(compare(rivals, rounds=7))
    print("forward and backward")
    print(compare({name: lambda call=call: call().sum().backward() for name, call in rivals.items()}, rounds=7))


if __name__ == "__main__":
    main()
