"""HS403: dead or all zero.

Units that never move, whatever the input, or a state that is all zero.

**How it is known.** Every track of the plain call, and of a call with other rows: a unit has to be dead in both.

**Limit.** `dead = 1e-5`: the range of a unit over all rows and steps; `dead_share = 0.5`, and `dead_share_relu = 0.9`
where some units are exactly zero, as a ReLU makes them.

## Sick

```python
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn = nn.RNN(3, 8, nonlinearity="relu", batch_first=True)
        nn.init.constant_(self.rnn.bias_ih_l0, -50.0)

    def forward(self, x):
        return self.rnn(x)[0]

model = Model()
x = torch.randn(4, 10, 3)
```

## Healthy

```python
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn = nn.RNN(3, 8, nonlinearity="relu", batch_first=True)

    def forward(self, x):
        return self.rnn(x)[0]

model = Model()
x = torch.randn(4, 10, 3)
```
"""

from __future__ import annotations

from ..patient import Patient
from ..probes.states import RecordedStates, VariedStates, real
from ..rule import Rule, Severity, Symptom


def check(patient: Patient) -> Symptom | None:
    """Units that never move, or a state that is all zero."""
    limits = patient.thresholds
    for name, track in patient[RecordedStates].finite().items():
        values = real(track, track.h)
        if len(values) < 2:
            continue
        if not bool(values.any()):
            # A second look: zeros in, zeros out, where there is no bias.
            again = patient[VariedStates].get(name)
            if again is not None and bool(again.h.any()):
                continue
            return _dead(name, f"all {values.numel()} values of the state are exactly 0 (limit: some)", "error", 1.0)
        if len(values) < 8:
            continue
        share = float(((values.amax(0) - values.amin(0)) < limits.dead).float().mean())
        off = float((values.abs().amax(0) == 0).float().mean())
        limit = limits.dead_share_relu if off > 0 else limits.dead_share
        if share > limit and values.shape[1] > 1 and _still_dead(patient, name, limits.dead, limit):
            return _dead(
                name,
                f"{share:.0%} of {values.shape[1]} units vary by less than {limits.dead:g} over all rows and steps "
                f"(limit {limit:.0%})",
                "warning",
                share,
            )
    return None


def _still_dead(patient: Patient, name: str, dead: float, limit: float) -> bool:
    """Whether as many units are dead when all rows and steps of the input differ."""
    again = patient[VariedStates].get(name)
    if again is None:
        return True
    values = real(again, again.h)
    return float(((values.amax(0) - values.amin(0)) < dead).float().mean()) > limit


def _dead(where: str, seen: str, severity: Severity, share: float) -> Symptom:
    return Symptom(
        severity,
        where,
        f"{seen}.",
        "weights of zero, a ReLU pushed below zero for good, or an input that is all zero",
        "nn.init.xavier_uniform_(layer.weight_ih_l0); a smaller learning rate; tanh instead of ReLU",
        {"share": share},
    )


RULE = Rule(
    "HS403",
    "dead or all zero",
    check,
    probes=(RecordedStates, VariedStates),
    explains=("HS103", "HS104", "HS302", "HS303", "HS501", "HS503"),
)
