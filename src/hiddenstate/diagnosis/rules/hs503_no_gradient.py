"""HS503: parameters without gradient.

Parameters that want a gradient and get none: a layer that was left over, or whose result is detached on the way.

**How it is known.** Gradients of `loss=`, or else of all outputs, on three batches, in training and in eval mode. An
exact zero that other values of the parameter lift is a unit that is off, and not told. Where the output follows the
parameter, so that its gradient was lost on the way, it is an error.

**Limit.** Above 0.

## Sick

```python
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(3, 8, batch_first=True)
        self.head = nn.Linear(8, 2)
        self.old_head = nn.Linear(8, 2)

    def forward(self, x):
        return self.head(self.lstm(x)[0])

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
        return self.head(self.lstm(x)[0])

model = Model()
x = torch.randn(4, 10, 3)
```
"""

from __future__ import annotations

from ..advice import freezing
from ..graphs import place_of_cut
from ..patient import Patient
from ..probes.calls import PlainCall, RepeatedCall, TracedCall
from ..probes.gradients import (
    ParameterGradients,
    in_torch_layers,
    matters,
    meets_zeros,
    reaches_outputs,
)
from ..rule import Rule, Severity, Symptom

_MOST = 12  # suspects that are tried one by one


def check(patient: Patient) -> Symptom | None:
    """Parameters that want a gradient and get none."""
    found = patient[ParameterGradients]
    if not found.usable:
        return None
    without: list[str] = []
    named = dict(patient.model.named_parameters())
    whole = in_torch_layers(patient.model)
    for name, size in found.sizes.items():
        # An exact zero that other values lift is a unit that is off, such as a ReLU, and not a lost parameter.
        # A torch layer of one step that starts from zeros has a recurrent weight without effect, and no fault.
        # So has one that only ever meets zeros, such as spikes that have not come yet.
        off = name not in whole and len(without) < _MOST
        idle = size == 0 and name not in found.missing and off and not meets_zeros(patient, named[name])
        if size == 0 and (name in found.missing or (idle and not matters(patient, name))):
            without.append(name)
    if not without:
        return None
    entered = {id(t) for operation in patient[TracedCall].trace for t in operation.inputs}
    called = [name for name in without if id(named[name]) in entered]
    shown = ", ".join(without[:3]) + (", …" if len(without) > 3 else "")
    severity: Severity = "warning"
    cause = "they are never used in forward: a layer left over, or another one used in its place"
    advice = freezing(without, patient.model)
    if called:
        cause = "what they give is dropped or overwritten before the output"
    if called and any(matters(patient, name) for name in called[:2]):
        line, by = place_of_cut(patient[TracedCall], *(named[name] for name in called))
        way = f"{by} on {line}" if by else "it is made under torch.no_grad(), or a whole number is made of it"
        cause = f"what they give moves the output, and has lost its graph on the way: {way}"
        advice = f"{advice.partition('  #')[0]}  # where this is meant; else hand on what they give with its graph"
        severity = "error"
        if patient.loss is not None and reaches_outputs(patient, called[0]):
            cause = "the model returns what they give, and the loss does not use it, or cuts it from the graph"
            advice, severity = freezing(without, patient.model), "warning"
    return Symptom(
        severity,
        shown,
        f"{len(without)} of {len(found.sizes)} parameters have no gradient on {found.batches} batches (limit 0).",
        cause,
        advice,
        {"without": len(without), "limit": 0.0},
    )


RULE = Rule(
    "HS503", "parameters without gradient", check, probes=(ParameterGradients, PlainCall, RepeatedCall, TracedCall)
)
