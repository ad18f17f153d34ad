"""HS107: last step of a bidirectional output.

At its last step, the reverse direction of a bidirectional layer has only begun: half of what enters the head has seen
one step.

**How it is known.** The gradient of the output arrives at one step alone of the reverse half of the layer's output, and
that is the last real step of each row.

**Limit.** None: it is so or it is not.

## Sick

```python
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(3, 8, batch_first=True, bidirectional=True)
        self.head = nn.Linear(16, 2)

    def forward(self, x):
        out, _ = self.lstm(x)
        return self.head(out[:, -1])

model = Model()
x = torch.randn(4, 10, 3)
```

## Healthy

```python
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(3, 8, batch_first=True, bidirectional=True)
        self.head = nn.Linear(16, 2)

    def forward(self, x):
        _, (h_n, _) = self.lstm(x)
        return self.head(torch.cat([h_n[-2], h_n[-1]], dim=1))

model = Model()
x = torch.randn(4, 10, 3)
```
"""

from __future__ import annotations

import torch

from ..outcome import steps_of_rows
from ..patient import Patient
from ..probes.gradients import Summaries, arrives
from ..rule import Rule, Symptom


def check(patient: Patient) -> Symptom | None:
    """The reverse half of what enters the head has seen one step."""
    for arrival in patient[Summaries]:
        call = arrival.call
        if not call.layer.spec.bidirectional or arrival.output is None or arrives(*arrival.state.values()):
            continue
        lengths, half = steps_of_rows(call), arrival.output.shape[2] // 2
        used = arrival.output.abs()[:, :, half:].sum(2) > 0  # (batch, time)
        if len(used) != len(lengths) or int(lengths.max()) < 2:
            continue
        ends = (lengths - 1).to(used.device)
        at_end = torch.zeros_like(used)
        at_end[torch.arange(len(used), device=used.device), ends] = True
        last_column = torch.zeros_like(used)
        last_column[:, -1] = True
        if not bool(used.any()) or (bool((used & ~at_end).any()) and bool((used & ~last_column).any())):
            continue
        return Symptom(
            "error",
            call.layer.label,
            f"the reverse direction is used at one of {used.shape[1]} steps, the last, where it has seen 1 step: "
            f"{half} of {2 * half} units that enter the head (needed: all steps seen).",
            "out[:, -1] of a bidirectional layer is the end of the forward direction, but the start of the reverse one",
            "take both ends: torch.cat([h_n[-2], h_n[-1]], dim=1), or hs.pool.Last(bidirectional=True)",
            {"steps_seen": 1, "units": half},
        )
    return None


RULE = Rule(
    "HS107",
    "last step of a bidirectional output",
    check,
    probes=(Summaries,),
    explains=("HS106", "HS109", "HS302", "HS503"),
)
