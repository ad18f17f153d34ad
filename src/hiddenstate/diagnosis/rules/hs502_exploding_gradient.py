"""HS502: gradient explodes through time.

On its way back through time the gradient grows: one long sequence is enough to destroy the weights.

**How it is known.** As for HS501.

**Limit.** `exploding = 1e3`.

## Sick

```python
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn = nn.RNN(3, 8, nonlinearity="relu", batch_first=True)
        with torch.no_grad():
            self.rnn.weight_hh_l0.copy_(1.5 * torch.eye(8))

    def forward(self, x):
        return self.rnn(x)[0]

model = Model()
x = torch.randn(4, 30, 3)
```

## Healthy

```python
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn = nn.RNN(3, 8, nonlinearity="relu", batch_first=True)
        with torch.no_grad():
            self.rnn.weight_hh_l0.copy_(torch.eye(8))

    def forward(self, x):
        return self.rnn(x)[0]

model = Model()
x = torch.randn(4, 30, 3)
```
"""

from __future__ import annotations

from ..patient import Patient
from ..probes.slopes import Slopes, over_all_steps
from ..rule import Rule, Symptom


def check(patient: Patient) -> Symptom | None:
    """The first step's gradient drowns the last one's."""
    limit = patient.thresholds.exploding
    grown = [slope for slope in patient[Slopes] if slope.whole > limit]
    if not grown:
        return None
    worst = max(grown, key=lambda slope: slope.whole)
    return Symptom(
        "warning" if worst.ratio > limit else "note",
        worst.name,
        f"the gradient of the last state at the first of {worst.steps} steps is {worst.ratio:.2g} times that "
        f"at the last (limit {limit:.0e}); a factor of {worst.per_step:.2f} per step"
        f"{over_all_steps(patient, worst, crossed=worst.ratio > limit)}.",
        "the recurrent weights amplify: their spectral radius is above 1",
        "torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0); nn.init.orthogonal_(rnn.weight_hh_l0)",
        {"ratio": worst.ratio, "limit": limit, "per_step": worst.per_step},
    )


RULE = Rule("HS502", "gradient explodes through time", check, probes=(Slopes,), explains=("HS104", "HS304"))
