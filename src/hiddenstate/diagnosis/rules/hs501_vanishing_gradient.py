"""HS501: gradient vanishes through time.

On its way back through time the gradient is lost: what happened early cannot be learned.

**How it is known.** For each layer, the gradient of its last state to its input at the first step, against that at the
last step.

**Limit.** `vanishing = 1e-6`. A fresh network forgets about half at each step, so that 20 steps or more reach this
limit without any fault: that is a note. It becomes a warning below a factor of 0.2 per step.

## Sick

```python
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn = nn.RNN(3, 8, batch_first=True)
        self.head = nn.Linear(8, 2)
        with torch.no_grad():
            self.rnn.weight_hh_l0.mul_(0.1)

    def forward(self, x):
        return self.head(self.rnn(x)[0][:, -1])

model = Model()
x = torch.randn(4, 30, 3)
```

## Healthy

```python
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn = nn.RNN(3, 8, batch_first=True)
        self.head = nn.Linear(8, 2)
        nn.init.orthogonal_(self.rnn.weight_hh_l0)

    def forward(self, x):
        return self.head(self.rnn(x)[0][:, -1])

model = Model()
x = 0.1 * torch.randn(4, 30, 3)
```
"""

from __future__ import annotations

from ..advice import remembering
from ..patient import Patient
from ..probes.slopes import FADING, Slopes, over_all_steps
from ..rule import Rule, Symptom


def check(patient: Patient) -> Symptom | None:
    """The first step's gradient is lost beside the last one's."""
    limit = patient.thresholds.vanishing
    lost = [slope for slope in patient[Slopes] if slope.whole < limit]
    if not lost:
        return None
    worst = min(lost, key=lambda slope: slope.per_step)
    # A fresh network forgets about half at each step: over many steps that is worth a note, and not an alarm.
    grave = worst.per_step < FADING
    return Symptom(
        "warning" if grave else "note",
        worst.name,
        f"the gradient of the last state at the first of {worst.steps} steps is {worst.ratio:.2g} of that at the last "
        f"(limit {limit:.0e}); a factor of {worst.per_step:.2f} per step"
        f"{over_all_steps(patient, worst, crossed=worst.ratio < limit)}.",
        "each step passes on less than it gets: small recurrent weights, saturated units, or a forget gate "
        "that is half shut",
        remembering(next((layer for layer in patient.layers if layer.label == worst.name), None)),
        {"ratio": worst.ratio, "limit": limit, "per_step": worst.per_step},
    )


RULE = Rule("HS501", "gradient vanishes through time", check, probes=(Slopes,))
