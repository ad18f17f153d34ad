"""HS404: identical across the batch.

Every row has the same states, though the rows of the input differ: the input does not reach the layer.

**How it is known.** A call in which all rows hold different values.

**Limit.** `identical = 1e-6`: the spread over rows, relative to the size of the state.

## Sick

```python
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(3, 8, batch_first=True)
        self.head = nn.Linear(8, 2)
        nn.init.zeros_(self.lstm.weight_ih_l0)

    def forward(self, x):
        return self.head(self.lstm(x)[0]) + x.mean(-1, keepdim=True)

model = Model()
x = torch.randn(4, 10, 3)
```

## Healthy

```python
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(3, 8, batch_first=True)
        self.head = nn.Linear(8, 2)

    def forward(self, x):
        return self.head(self.lstm(x)[0]) + x.mean(-1, keepdim=True)

model = Model()
x = torch.randn(4, 10, 3)
```
"""

from __future__ import annotations

from ..patient import Patient
from ..probes.states import IdenticalRows
from ..rule import Rule, Symptom


def check(patient: Patient) -> Symptom | None:
    """Every row has the same states, though rows of the input differ."""
    seen, limit = patient[IdenticalRows], patient.thresholds.identical
    if not seen.track:
        return None
    return Symptom(
        "warning",
        seen.track,
        f"the states of {seen.rows} rows with different input differ by {seen.spread:.2g} of their size at most "
        f"(limit {limit:.0e}).",
        "the input does not reach the layer: weights of zero, a constant fed in its place, or a collapsed embedding",
        "look at what enters the layer: with hs.record(model) as rec: model(x)",
        {"spread": seen.spread, "limit": limit},
    )


RULE = Rule("HS404", "identical across the batch", check, probes=(IdenticalRows,))
