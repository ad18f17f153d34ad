"""HS402: saturated.

Most of a state, or of its gates, is pressed against the ends of its range, where no gradient passes.

**How it is known.** Every track of the plain call is recorded with its gates.

**Limit.** `saturated = 0.95`: |h| from which it counts; `saturated_share = 0.5`: the share of such values;
`saturated_gates = 0.9`: the share of gate values below 0.05 or above 0.95. Activation functions without bounds cannot
saturate.

## Sick

```python
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn = nn.RNN(3, 8, batch_first=True)
        self.head = nn.Linear(8, 2)

    def forward(self, x):
        return self.head(self.rnn(x)[0])

model = Model()
x = 1000 + 300 * torch.randn(4, 10, 3)
```

## Healthy

```python
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn = nn.RNN(3, 8, batch_first=True)
        self.head = nn.Linear(8, 2)

    def forward(self, x):
        x = (x - 1000) / 300
        return self.head(self.rnn(x)[0])

model = Model()
x = 1000 + 300 * torch.randn(4, 10, 3)
```
"""

from __future__ import annotations

from ..patient import Patient
from ..probes.states import SaturatedStates
from ..rule import Rule, Symptom


def check(patient: Patient) -> Symptom | None:
    """Most of a state, or of its gates, is pressed against the ends of its range."""
    limits, seen = patient.thresholds, patient[SaturatedStates]
    if not seen.track:
        return None
    what = (
        f"{seen.share:.0%} of the values of |h| are ≥ {limits.saturated:g} (limit {limits.saturated_share:.0%})"
        if seen.by_states
        else f"{seen.gates:.0%} of the gates are below 0.05 or above 0.95 (limit {limits.saturated_gates:.0%})"
    )
    return Symptom(
        "warning",
        seen.track,
        f"{what}; mean |h| is {seen.mean_abs:.3g}.",
        "inputs or weights are too large: no gradient passes through a saturated tanh or sigmoid",
        "x = (x - mean) / std before the layer; a smaller learning rate; nn.init.orthogonal_(layer.weight_hh_l0)",
        {"share": seen.share, "gates": seen.gates, "limit": limits.saturated_share},
    )


RULE = Rule(
    "HS402",
    "saturated",
    check,
    probes=(SaturatedStates,),
    explains=("HS103", "HS104", "HS403", "HS404", "HS405", "HS501"),
)
