"""HS405: constant over time.

A state that does not change from step to step, though the input does.

**How it is known.** A call in which all steps hold different values. In a cell of your own, a part that a gate is
applied to and that comes out of a step as it went in. In a loop, a first state that a gate of every step is applied to.

**Limit.** `identical = 1e-6`: the spread over steps, relative to the size of the state.

## Sick

```python
class Cell(nn.Module):
    def __init__(self):
        super().__init__()
        self.hidden_size = 8
        self.i2h, self.h2h = nn.Linear(3, 8), nn.Linear(8, 8)

    def forward(self, x, h):
        new = torch.tanh(self.i2h(x) + self.h2h(h))
        return new, h                             # the old state

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.cell = Cell()
        self.h0 = nn.Parameter(torch.randn(1, 8))

    def forward(self, x):
        h, outs = self.h0.expand(len(x), -1), []
        for x_t in x.unbind(1):
            out, h = self.cell(x_t, h)
            outs.append(out)
        return torch.stack(outs, 1)

model = Model()
x = torch.randn(4, 10, 3)
```

## Healthy

```python
class Cell(nn.Module):
    def __init__(self):
        super().__init__()
        self.hidden_size = 8
        self.i2h, self.h2h = nn.Linear(3, 8), nn.Linear(8, 8)

    def forward(self, x, h):
        new = torch.tanh(self.i2h(x) + self.h2h(h))
        return new, new

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.cell = Cell()
        self.h0 = nn.Parameter(torch.randn(1, 8))

    def forward(self, x):
        h, outs = self.h0.expand(len(x), -1), []
        for x_t in x.unbind(1):
            out, h = self.cell(x_t, h)
            outs.append(out)
        return torch.stack(outs, 1)

model = Model()
x = torch.randn(4, 10, 3)
```
"""

from __future__ import annotations

from ...cells import Layer
from ..advice import drawn_anew
from ..patient import Patient
from ..probes.cells import CellTrials
from ..probes.factors import NeverUpdated
from ..probes.states import ConstantStates, RecordedStates
from ..rule import Rule, Symptom


def check(patient: Patient) -> Symptom | None:
    """A state does not change from step to step, though the input does."""
    seen, limit = patient[ConstantStates], patient.thresholds.identical
    for trial in patient[CellTrials]:
        if trial.kept:
            return Symptom(
                "warning",
                f"{trial.name} part {trial.kept}",
                f"part {trial.kept!r} of the state comes out of a step as it went in: 0 of its values change (needed: "
                f"those that the gates let through).",
                f"the new {trial.kept} is computed, and the old one is returned",
                f"c = f * c + i * g; h = o * torch.tanh(c); return h, c  # the same {trial.kept} in both",
                {"spread": 0.0, "limit": limit},
            )
    never = patient[NeverUpdated]
    if never.line:
        return Symptom(
            "warning",
            never.line,
            f"at each of {never.steps} steps a gate is applied to one and the same first state (needed: to what the "
            f"last step made of it).",
            "the new part of the state is computed, and never handed on: the next step reads the first one again",
            "c = f * c + i * g  # under the name that the next step reads",
            {"steps": never.steps, "limit": 1.0},
        )
    if not seen.track:
        return None
    gates = patient[RecordedStates][seen.track].gates if seen.track in patient[RecordedStates] else {}
    shut = "update" in gates and float(gates["update"].min()) > 0.999
    shut = shut or ("forget" in gates and float(gates["forget"].min()) > 0.999 and float(gates["input"].max()) < 1e-3)
    return Symptom(
        "warning",
        seen.track,
        f"over {seen.steps} steps of different input the state changes by {seen.spread:.2g} of its size at most "
        f"(limit {limit:.0e}).",
        "the gates keep the old state and let nothing new in, at every step"
        if shut
        else "the state is never updated, or the same step is fed again and again",
        f"{drawn_anew(_layer(patient, seen.track))}  # its biases, above all"
        if shut
        else "hand each step in: for x_t in x.unbind(1): h = self.cell(x_t, h)",
        {"spread": seen.spread, "limit": limit},
    )


def _layer(patient: Patient, track: str) -> Layer | None:
    return next((each for each in patient.layers if not each.name or track.startswith(each.name)), None)


RULE = Rule(
    "HS405",
    "constant over time",
    check,
    probes=(CellTrials, ConstantStates, NeverUpdated, RecordedStates),
    explains=("HS302", "HS403", "HS404", "HS501"),
)
