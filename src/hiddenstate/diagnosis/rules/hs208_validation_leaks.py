"""HS208: validation leaks into training.

A model that keeps its state is evaluated between two training batches, and the next training batch goes on from where
the validation data ended.

**How it is known.** `hs.Monitor` compares the state that a layer is handed in a training call with the one in which it
ended in the eval call before. `hs.diagnose`, which sees no training, does not tell it.

**Limit.** Not once.

## Sick

```python
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.gru, self.hidden = nn.GRU(3, 8, batch_first=True), None

    def reset_state(self):
        self.hidden = None

    def forward(self, x):
        out, hidden = self.gru(x, self.hidden)
        self.hidden = hidden.detach()
        return out

model = Model()

def step(optimizer):
    model(torch.randn(4, 10, 3)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    model.eval()
    model(torch.randn(4, 10, 3))
    model.train()
```

## Healthy

```python
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.gru, self.hidden = nn.GRU(3, 8, batch_first=True), None

    def reset_state(self):
        self.hidden = None

    def forward(self, x):
        out, hidden = self.gru(x, self.hidden)
        self.hidden = hidden.detach()
        return out

model = Model()

def step(optimizer):
    model(torch.randn(4, 10, 3)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    model.eval()
    model.reset_state()
    model(torch.randn(4, 10, 3))
    model.reset_state()
    model.train()
```
"""

from __future__ import annotations

from ..patient import Patient
from ..rule import Rule, Symptom


def check(patient: Patient) -> Symptom | None:
    """Nothing: only a training run shows it."""
    return None


RULE = Rule("HS208", "validation leaks into training", check, monitored=True)
