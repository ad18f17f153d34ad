"""HS201: state survives from call to call.

The model keeps a state between calls, so that a result depends on what was asked before.

**How it is known.** The same input twice in eval mode, with the same seed, gives another output. Where a method that is
called like it (`reset`, `reset_states`, `init_sequence`, `clear_memory`, also of modules inside) brings the first one
back, the state is kept on purpose: a note names the method. So it is with a model that `hs.Carry` carries.

**Limit.** Exactly zero.

## Sick

```python
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(3, 8, batch_first=True)
        self.head = nn.Linear(8, 2)
        self.hidden = None

    def forward(self, x):
        out, hidden = self.lstm(x, self.hidden)
        self.hidden = tuple(part.detach() for part in hidden)
        return self.head(out)

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
        out, _ = self.lstm(x)
        return self.head(out)

model = Model()
x = torch.randn(4, 10, 3)
```

A smaller last batch makes such a model fail as well, see [HS204](HS204.md); [Carry](../diagnosis.md) keeps states for a
model that knows nothing of it.
"""

from __future__ import annotations

from ..patient import Patient
from ..probes.calls import RepeatedCall
from ..rule import Rule, Severity, Symptom


def check(patient: Patient) -> Symptom | None:
    """The same input twice, in eval mode and with the same seed, gives another output."""
    seen = patient[RepeatedCall]
    if seen.gap == 0:
        return None
    names = ", ".join(seen.changed) or "some attribute"
    severity: Severity = "note"
    if patient.carry is not None:
        cause, advice = "an hs.Carry is attached, which carries the state", "carry.reset() starts anew"
    elif seen.reset:
        cause = f"the model keeps its state between calls on purpose: after {seen.reset}() it starts anew"
        advice = f"call model.{seen.reset}() before each new sequence, also before validation"
    else:
        severity = "error"
        cause = f"a state is kept in the model between calls ({names}), and nothing says when a new sequence begins"
        if seen.tried:
            cause = f"a state is kept in the model between calls ({names}), and {seen.tried}() does not bring it back"
        advice = (
            "start each call anew: out, _ = self.lstm(x), and let `with hs.Carry(model):` carry the state where "
            "batches go on; or give the model a method reset_state() that sets it to None, and call it"
        )
    size = "another shape" if seen.gap == float("inf") else f"{seen.gap:.2g} of the output's size"
    return Symptom(
        severity,
        names,
        f"the same input and seed twice in eval mode: the outputs differ by {size} (limit 0).",
        cause,
        advice,
        {"gap": seen.gap, "limit": 0.0},
    )


RULE = Rule("HS201", "state survives from call to call", check, probes=(RepeatedCall,), explains=("HS108", "HS202"))
