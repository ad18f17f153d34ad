"""What an examination costs in training steps, and what a Monitor adds to training.

python benchmarks/diagnose.py
"""

import time

import torch
from torch import nn

import hiddenstate as hs
from timing import compare


class Tagger(nn.Module):
    """Two layers of 256 units and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(256, 256, num_layers=2, batch_first=True)
        self.head = nn.Linear(256, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return one output for each step."""
        return self.head(self.lstm(x)[0])


def main() -> None:
    """Print both tables."""
    torch.manual_seed(0)
    model, x = Tagger(), torch.randn(16, 50, 256)
    optimizer = torch.optim.Adam(model.parameters())

    def forward_and_backward() -> None:
        model(x).square().mean().backward()

    def train(steps: int = 50) -> None:
        for _ in range(steps):
            optimizer.zero_grad()
            forward_and_backward()
            optimizer.step()

    def watched() -> None:
        with hs.Monitor(model, optimizer):
            train()

    print("all checks, 2 x LSTM-256, 16 rows of 50 steps, in units of one forward and backward (at most 30)")
    print(
        compare(
            {"forward and backward": forward_and_backward, "diagnose": lambda: hs.diagnose(model, x)},
            rounds=5,
            clock=time.process_time,
        )
    )
    print("50 training steps, plain and with a Monitor that looks at one of them (at most 1.03)")
    print(compare({"plain": train, "with Monitor": watched}, rounds=5, warmup=1, clock=time.process_time))


if __name__ == "__main__":
    main()
