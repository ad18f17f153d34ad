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

from torch import nn

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
        "each step amplifies: the recurrent weights, or a factor on the old state, are above 1",
        _calming(patient, worst.name),
        {"ratio": worst.ratio, "limit": limit, "per_step": worst.per_step},
    )


def _calming(patient: Patient, name: str) -> str:
    """Return how a layer is kept from amplifying."""
    layer = next((each for each in patient.layers if each.label == name), None)
    path = "model" if layer is None or not layer.name else f"model.{layer.name}"
    if layer is not None and isinstance(layer.module, nn.RNNBase):
        return f"{path}.reset_parameters()  # or nn.init.orthogonal_ on each weight_hh; and clip_grad_norm_ in training"
    return "h = torch.tanh(self.input(x) + self.recurrent(h))  # a bound, or factors on the old h of at most 1"


RULE = Rule("HS502", "gradient explodes through time", check, probes=(Slopes,), explains=("HS104", "HS304"))
