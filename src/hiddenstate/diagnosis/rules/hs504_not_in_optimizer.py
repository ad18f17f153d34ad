"""HS504: parameters missing from the optimizer.

Parameters that want a gradient and are in no group of the optimizer: they stay as they were drawn.

**How it is known.** With `optimizer=` (one, or a list of several), by identity.

**Limit.** None missing.

## Sick

```python
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(3, 8, batch_first=True)
        self.head = nn.Linear(8, 2)

    def forward(self, x):
        return self.head(self.lstm(x)[0])

model = Model()
optimizer = torch.optim.Adam(model.parameters())
model.head = nn.Linear(8, 5)                      # too late
x = torch.randn(4, 10, 3)
options = {"optimizer": optimizer}
```

## Healthy

```python
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(3, 8, batch_first=True)
        self.head = nn.Linear(8, 2)

    def forward(self, x):
        return self.head(self.lstm(x)[0])

model = Model()
model.head = nn.Linear(8, 5)
optimizer = torch.optim.Adam(model.parameters())
x = torch.randn(4, 10, 3)
options = {"optimizer": optimizer}
```
"""

from __future__ import annotations

from ..patient import Patient
from ..rule import Rule, Symptom


def check(patient: Patient) -> Symptom | None:
    """Parameters that want a gradient and are in no optimizer."""
    if not patient.optimizers:
        return None
    optimized = patient.optimized
    missing = [n for n, p in patient.model.named_parameters() if p.requires_grad and id(p) not in optimized]
    total = sum(1 for p in patient.model.parameters() if p.requires_grad)
    if not missing:
        return None
    shown = ", ".join(missing[:3]) + (", …" if len(missing) > 3 else "")
    return Symptom(
        "error",
        shown,
        f"{len(missing)} of {total} parameters that want a gradient are in no group of the optimizer (limit 0).",
        "its groups leave them out, or it was made before these layers were"
        if len(missing) < total
        else "the optimizer holds the parameters of another model, or of this one before it was replaced",
        f"optimizer.add_param_group({{'params': [p for n, p in model.named_parameters() if n in {missing[:8]!r}]}})"
        if len(missing) <= 8 and len(missing) < total
        else "optimizer = torch.optim.Adam(model.parameters()), after the model is complete",
        {"missing": len(missing), "limit": 0.0},
    )


RULE = Rule("HS504", "parameters missing from the optimizer", check, static=True)
