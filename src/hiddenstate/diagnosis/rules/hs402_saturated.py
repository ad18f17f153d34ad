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

from torch import Tensor

from ..advice import drawn_anew
from ..patient import Patient
from ..probes.calls import PlainCall
from ..probes.states import SaturatedStates, recorded
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
    large = _size_of_input(patient)
    layer = next((each for each in patient.layers if not each.name or seen.track.startswith(each.name)), None)
    anew = drawn_anew(layer or next(iter(patient.seen), None))
    if large > _LARGE and _saturated_when_scaled(patient, seen.track):
        cause = (
            f"what enters the layer is too large, its standard deviation {large:.3g}, and so are its weights: scaled "
            f"to 1, the states are saturated as well"
        )
        advice = f"{anew}  # and x = (x - mean) / std, with numbers of the training data, before the layer"
    elif large > _LARGE:
        cause = f"what enters the layer is too large, its standard deviation {large:.3g}: no gradient passes through"
        advice = "x = (x - mean) / std, with numbers of the training data, before the layer"
    elif patient.survey is not None:  # the first batch is not the one to blame
        cause = "inputs of other batches, or weights, are too large: no gradient passes through what is saturated"
        advice = "x = (x - mean) / std, with numbers of the training data, before the layer"
    else:
        cause = "weights or biases are too large: no gradient passes through a saturated tanh or sigmoid"
        advice = f"{anew}  # within ±1/sqrt(units); then a smaller learning rate"
    return Symptom(
        "warning",
        seen.track,
        f"{what}{f'; mean |h| is {seen.mean_abs:.3g}' if seen.by_states else ''}{patient.looked_at()}.",
        cause,
        advice,
        {"share": seen.share, "gates": seen.gates, "limit": limits.saturated_share},
    )


def _saturated_when_scaled(patient: Patient, track: str) -> bool:
    """Whether the states are saturated too where the input has a mean of 0 and a standard deviation of 1."""
    x = patient.inputs.get(patient.inputs.main)
    if not isinstance(x, Tensor) or not x.is_floating_point():
        return False
    scaled = recorded(patient, patient.inputs.put(patient.inputs.main, (x - x.mean()) / x.std()), gates=False)
    if track not in scaled:
        return False
    limits = patient.thresholds
    return float((scaled[track].h.abs() >= limits.saturated).float().mean()) > limits.saturated_share


def _size_of_input(patient: Patient) -> float:
    """Return the standard deviation of what enters the first layer, or of the input where a loop is written out."""
    calls, x = patient[PlainCall].calls, patient.inputs.get(patient.inputs.main)
    fed = calls[0].x if calls else x
    return float(fed.double().std()) if isinstance(fed, Tensor) and fed.is_floating_point() and fed.numel() > 1 else 0.0


RULE = Rule(
    "HS402",
    "saturated",
    check,
    probes=(PlainCall, SaturatedStates),
    explains=("HS103", "HS104", "HS403", "HS404", "HS405", "HS501"),
)
