"""HS404: identical across the batch.

Every row has the same states, though the rows of the input differ: the input does not reach the layer.

**How it is known.** A call in which all rows hold different values. Where that is healthy, and half of the rows of
your own batch or more have the same states, a note says so.

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

import torch
from torch import Tensor

from ..inputs import ModelInputs
from ..patient import Patient
from ..probes.states import IdenticalRows, RecordedStates
from ..rule import Rule, Symptom


def check(patient: Patient) -> Symptom | None:
    """Every row has the same states, though rows of the input differ."""
    seen, limit = patient[IdenticalRows], patient.thresholds.identical
    if not seen.track:
        return _same_input(patient)
    return Symptom(
        "warning",
        seen.track,
        f"the states of {seen.rows} rows with different input differ by {seen.spread:.2g} of their size at most "
        f"(limit {limit:.0e}).",
        "the input does not reach the layer: weights of zero, a constant fed in its place, or a collapsed embedding",
        "look at what enters the layer: with hs.record(model) as rec: model(x)",
        {"spread": seen.spread, "limit": limit},
    )


def _same_input(patient: Patient) -> Symptom | None:
    """Note that most rows of the batch are one and the same sequence."""
    inputs = patient.inputs
    if not inputs.batched or inputs.batch < 3 or inputs.steps < 2:
        return None
    for name, track in patient[RecordedStates].finite().items():
        if len(track.h) != inputs.batch or not bool(track.h.any()):
            continue
        _, counts = torch.unique(track.h.flatten(1), dim=0, return_counts=True)
        most = int(counts.max())
        if most >= 3 and 2 * most >= inputs.batch and _alike(inputs) < most:
            return Symptom(
                "warning",
                name,
                f"{most} of {inputs.batch} rows of the batch have the same states at all steps, and {_alike(inputs)} "
                f"the same input (limit: as many).",
                "what tells rows apart is lost before the layer: rounded away by .long(), clamped, or masked",
                "look at what enters the layer: with hs.record(model) as rec: model(x)",
                {"rows": inputs.batch, "identical": most},
            )
        if most >= 3 and 2 * most >= inputs.batch:
            return Symptom(
                "note",
                name,
                f"{most} of {inputs.batch} rows of the batch have the same states at all steps (limit: half of them).",
                "the batch holds one sequence several times: expanded, repeated or drawn again, or it is constant",
                "# look at the batch: torch.unique(x, dim=0).shape; rows that are alike teach and tell nothing more",
                {"rows": inputs.batch, "identical": most},
            )
    return None


def _alike(inputs: ModelInputs) -> int:
    """Return how many rows of the main input are one and the same."""
    x, axis = inputs.get(inputs.main), inputs.argument(inputs.main).rows
    if not isinstance(x, Tensor) or axis is None:
        return inputs.batch
    _, counts = torch.unique(x.movedim(axis, 0).flatten(1), dim=0, return_counts=True)
    return int(counts.max())


RULE = Rule("HS404", "identical across the batch", check, probes=(IdenticalRows, RecordedStates))
