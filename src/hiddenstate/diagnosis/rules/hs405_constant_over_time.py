"""HS405: constant over time.

A state that does not change from step to step, though the input does.

**How it is known.** A call in which all steps hold different values.

**Limit.** `identical = 1e-6`: the spread over steps, relative to the size of the state.

## Sick

```python
class Cell(nn.Module):
    def __init__(self):
        super().__init__()
        self.hidden_size = 8
        self.i2h, self.h2h = nn.Linear(3, 8), nn.Linear(8, 8)

    def forward(self, x, h):
        new = torch.tanh(self.i2h(x) + self.h2h(h))
        return new, h                             # the old state

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.cell = Cell()
        self.h0 = nn.Parameter(torch.randn(1, 8))

    def forward(self, x):
        h, outs = self.h0.expand(len(x), -1), []
        for x_t in x.unbind(1):
            out, h = self.cell(x_t, h)
            outs.append(out)
        return torch.stack(outs, 1)

model = Model()
x = torch.randn(4, 10, 3)
```

## Healthy

```python
class Cell(nn.Module):
    def __init__(self):
        super().__init__()
        self.hidden_size = 8
        self.i2h, self.h2h = nn.Linear(3, 8), nn.Linear(8, 8)

    def forward(self, x, h):
        new = torch.tanh(self.i2h(x) + self.h2h(h))
        return new, new

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.cell = Cell()
        self.h0 = nn.Parameter(torch.randn(1, 8))

    def forward(self, x):
        h, outs = self.h0.expand(len(x), -1), []
        for x_t in x.unbind(1):
            out, h = self.cell(x_t, h)
            outs.append(out)
        return torch.stack(outs, 1)

model = Model()
x = torch.randn(4, 10, 3)
```
"""

from __future__ import annotations

from ..patient import Patient
from ..probes.states import ConstantStates
from ..rule import Rule, Symptom


def check(patient: Patient) -> Symptom | None:
    """A state does not change from step to step, though the input does."""
    seen, limit = patient[ConstantStates], patient.thresholds.identical
    if not seen.track:
        return None
    return Symptom(
        "warning",
        seen.track,
        f"over {seen.steps} steps of different input the state changes by {seen.spread:.2g} of its size at most "
        f"(limit {limit:.0e}).",
        "the state is never updated, or the same step is fed again and again",
        "hand each step in: for x_t in x.unbind(1): h = self.cell(x_t, h)",
        {"spread": seen.spread, "limit": limit},
    )


RULE = Rule("HS405", "constant over time", check, probes=(ConstantStates,), explains=("HS403", "HS404"))
