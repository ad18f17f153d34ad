"""HS206: learned initial state that is not trained.

A first state that was meant to be learned stays as it was: it is no parameter, gets no gradient, or is unknown to the
optimizer.

**How it is known.** A tensor in an attribute wants a gradient and is no parameter; or a parameter that is named like a
first state (`h0`, `init_hidden`, …) gets no gradient on three batches, or is in no group of `optimizer=`.

**Limit.** Exactly zero.

## Sick

```python
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.h0 = torch.zeros(1, 1, 8, requires_grad=True)
        self.gru = nn.GRU(3, 8, batch_first=True)

    def forward(self, x):
        return self.gru(x, self.h0.expand(1, len(x), 8).contiguous())[0]

model = Model()
x = torch.randn(4, 10, 3)
```

## Healthy

```python
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.h0 = nn.Parameter(torch.zeros(1, 1, 8))
        self.gru = nn.GRU(3, 8, batch_first=True)

    def forward(self, x):
        return self.gru(x, self.h0.expand(1, len(x), 8).contiguous())[0]

model = Model()
x = torch.randn(4, 10, 3)
```
"""

from __future__ import annotations

import re

from torch import Tensor, nn

from ..patient import Patient
from ..probes.parameters import ParameterGradients
from ..rule import Rule, Symptom

_STATE = r"(h|c|hx|cx|hs|hidden|cell|state|s|h0|c0|hidden_state|cell_state)"


_FIRST = r"(init|initial|start|first|learned|default|zero)"


_INITIAL = re.compile(rf"(^|[._]){_STATE}_?(0|{_FIRST})$|(^|[._]){_FIRST}_?{_STATE}$|initial_", re.IGNORECASE)


def check(patient: Patient) -> Symptom | None:
    """A first state that wants to be learned and is not."""
    for thing in patient.unregistered:
        value = thing.value
        if isinstance(value, Tensor) and not isinstance(value, nn.Parameter) and value.is_leaf and value.requires_grad:
            return _untrained(
                thing.name,
                "it wants a gradient, and is not among the parameters() of the model: 0 of 1 (needed: 1).",
                "a tensor with requires_grad=True in an attribute is no parameter",
                f"self.{thing.holder.rpartition('.')[2]} = nn.Parameter(torch.zeros(...))",
            )
    names = {name: p for name, p in patient.model.named_parameters() if p.requires_grad and _INITIAL.search(name)}
    if not names:
        return None
    optimized = patient.optimized
    for name, parameter in names.items():
        if patient.optimizers and id(parameter) not in optimized:
            return _untrained(
                name,
                "it is a parameter of the model, and in 0 of the optimizer's groups (needed: 1).",
                "the optimizer was made before the parameter, or from other parameters",
                "make the optimizer after the model is complete: optimizer = Adam(model.parameters())",
            )
    gradients = patient[ParameterGradients]
    for name in names:
        if gradients.sizes.get(name) == 0 and gradients.usable:
            return _untrained(
                name,
                f"its gradient is {'missing' if name in gradients.missing else 'exactly 0'} on {gradients.batches} "
                f"batches (limit: above 0).",
                "it is detached, read through .data, or overwritten on the way to the layer",
                "h0 = self.h0.expand(-1, x.size(0), -1).contiguous(), without detach or .data",
            )
    return None


def _untrained(where: str, evidence: str, cause: str, advice: str) -> Symptom:
    return Symptom("error", where, evidence, cause, advice, {"trained": 0.0})


RULE = Rule(
    "HS206",
    "learned initial state that is not trained",
    check,
    probes=(ParameterGradients,),
    explains=("HS205", "HS302", "HS503", "HS504"),
)
