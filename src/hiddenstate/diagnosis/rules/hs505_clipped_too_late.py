"""HS505: gradients clipped after the step.

Gradients are clipped when the optimizer has already used them: the clipping does nothing.

**How it is known.** `hs.Monitor`, given the optimizer, remembers the gradients right before an update; at the next
training call all of them have been multiplied by one and the same number (`clip_grad_norm_`), or cut off at one and
the same number (`clip_grad_value_`). `hs.diagnose`, which sees no training, does not tell it. Gradients that are
zeroed in place before that call, as `zero_grad(set_to_none=False)` does, tell nothing.

**Limit.** None.

## Sick

```python
model = nn.GRU(3, 8, batch_first=True)

def step(optimizer):
    optimizer.zero_grad()
    model(torch.randn(4, 10, 3))[0].square().sum().backward()
    optimizer.step()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
```

## Healthy

```python
model = nn.GRU(3, 8, batch_first=True)

def step(optimizer):
    optimizer.zero_grad()
    model(torch.randn(4, 10, 3))[0].square().sum().backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    optimizer.step()
```
"""

from __future__ import annotations

from ..patient import Patient
from ..rule import Rule, Symptom


def check(patient: Patient) -> Symptom | None:
    """Nothing: only a training run shows it."""
    return None


RULE = Rule("HS505", "gradients clipped after the step", check, monitored=True)
