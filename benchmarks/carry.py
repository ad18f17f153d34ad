"""What carrying costs: the same stateful training loop, written by hand and with Carry.

Batch 32, 35 steps, two layers of LSTM 256, forward and backward and update. Carried over hand-written is to be <= 1.03.
"""

import torch
from torch import nn

import hiddenstate as hs
from timing import compare


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

    print(compare({"by hand": by_hand, "carried": carried}, rounds=41))
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
        print(compare({"cell by hand": cell_by_hand, "cell carried at every step": cell_carried}, rounds=41))


if __name__ == "__main__":
    main()
