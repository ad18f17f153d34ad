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
from ..probes.calls import PlainCall
from ..probes.states import SaturatedStates
from ..rule import Rule, Symptom

_LARGE = 4.0  # of inputs, from which on they saturate fresh weights


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
    large = float(patient[PlainCall].calls[0].x.double().std()) if patient[PlainCall].calls else 0.0
    if large > _LARGE:
        cause = f"what enters the layer is too large, its standard deviation {large:.3g}: no gradient passes through"
        advice = "x = (x - mean) / std, with numbers of the training data, before the layer"
    elif patient.survey is not None:  # the first batch is not the one to blame
        cause = "inputs of other batches, or weights, are too large: no gradient passes through what is saturated"
        advice = "x = (x - mean) / std, with numbers of the training data, before the layer"
    else:
        cause = "weights or biases are too large: no gradient passes through a saturated tanh or sigmoid"
        advice = "module.reset_parameters()  # drawn anew, within ±1/sqrt(units); then a smaller learning rate"
    return Symptom(
        "warning",
        seen.track,
        f"{what}{f'; mean |h| is {seen.mean_abs:.3g}' if seen.by_states else ''}{patient.looked_at()}.",
        cause,
        advice,
        {"share": seen.share, "gates": seen.gates, "limit": limits.saturated_share},
    )


RULE = Rule(
    "HS402",
    "saturated",
    check,
    probes=(PlainCall, SaturatedStates),
    explains=("HS103", "HS104", "HS403", "HS404", "HS405", "HS501"),
)
