"""HS104: input ignored.

The input does not reach the output: the model computes something, and not from what it was given. Also told of a second
input that no mode uses.

**How it is known.** Every step of the input is replaced, and no output moves; a cell of your own is called once more
with another input. An output that follows earlier steps but not its own is a note: a model that shifts its input inside
is right to do so.

**Limit.** `reach = 1e-6`: a change of the output, relative to its size.

## Sick

```python
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(3, 8, batch_first=True)
        self.head = nn.Linear(8, 2)

    def forward(self, x):
        out, _ = self.lstm(torch.zeros_like(x))
        return self.head(out[:, -1])

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
        return self.head(out[:, -1])

model = Model()
x = torch.randn(4, 10, 3)
```
"""

from __future__ import annotations

import torch

from ...state import Path, spelled
from ..difference import gap
from ..outcome import Outcome
from ..patient import Patient
from ..probes.calls import PlainCall
from ..probes.cells import CellTrials
from ..probes.layout import OutputLayout
from ..probes.steps import Reach
from ..rule import Rule, Symptom


def check(patient: Patient) -> Symptom | None:
    """The input does not reach the output."""
    limit = patient.thresholds.reach
    for trial in patient[CellTrials]:
        if trial.by_input == 0:
            return Symptom(
                "error",
                trial.name,
                "the cell's next state and output are the same whatever input it is given (change 0, limit 1e-06).",
                "the term with the input is missing from the cell",
                "h = torch.tanh(self.input(x) + self.recurrent(h))",
                {"change": 0.0, "limit": limit},
            )
    seen = patient[Reach]
    if seen.all is not None and seen.all <= limit and _nothing_moves(patient):
        return Symptom(
            "error",
            patient[PlainCall].calls.labels,
            f"with every step of the input replaced, the output moved by {seen.all:.2g} of its size "
            f"(limit {limit:.0e}).",
            "the output is computed from something else: another variable, a constant, a first state",
            "follow x through forward: each result must be passed on, as in x = self.embed(x); out, _ = self.lstm(x)",
            {"change": seen.all, "limit": limit},
        )
    return _second_input_unused(patient) or _one_step_late(patient)


def _nothing_moves(patient: Patient) -> bool:
    """Whether none of the outputs, the final one or others, moves when every row is replaced."""
    rows = torch.ones(patient.inputs.batch, dtype=torch.bool)
    return gap(patient[PlainCall], patient.run(patient.inputs.other_rows(rows, seed=9))) <= patient.thresholds.reach


def _second_input_unused(patient: Patient) -> Symptom | None:
    """Report a second sequence that no output follows."""
    limit = patient.thresholds.reach
    for argument in patient.inputs.arguments:
        if argument.kind != "sequence" or argument.path == patient.inputs.main or argument.time is None:
            continue
        # Teacher forcing is for training only: an input counts as unused when neither mode uses it.
        if gap(*_replaced_everywhere(patient, argument.path)) > limit:
            continue
        if gap(*_replaced_everywhere(patient, argument.path, train=True)) > limit:
            continue
        return Symptom(
            "warning",
            f"input{spelled(argument.path)}",
            f"with every step of this input replaced, no output moved, in eval and in training (0, limit {limit:.0e}).",
            "it is overwritten or mistaken for another variable in forward",
            "use it: b = self.tower(second)",
            {"change": 0.0, "limit": limit},
        )
    return None


def _replaced_everywhere(patient: Patient, path: Path, *, train: bool = False) -> tuple[Outcome, Outcome]:
    """Return the plain call and one with every step of one input replaced."""
    inputs = patient.inputs
    argument = inputs.argument(path)
    mask = torch.ones(inputs.batch, max(argument.steps, 1), dtype=torch.bool)
    plain = patient.run(train=train) if train else patient[PlainCall]
    return plain, patient.run(inputs.other_steps(mask, (path,), seed=5), train=train)


def _one_step_late(patient: Patient) -> Symptom | None:
    """Report an output that follows earlier steps, and not its own."""
    leaf = patient[OutputLayout].main
    seen = patient[Reach]
    if leaf is None or not leaf.stepwise or not seen.earlier:
        return None
    if seen.last is None or seen.last > patient.thresholds.reach:
        return None
    return Symptom(
        "note",
        patient[PlainCall].calls.labels,
        f"the last output does not follow the last step of the input (moved by {seen.last:.2g}), only earlier ones.",
        "the output is taken before the state is updated, or the input is shifted inside the model",
        "update first, then read: h = self.cell(x_t, h); y = self.head(h)",
        {"change": seen.last, "limit": patient.thresholds.reach},
    )


RULE = Rule(
    "HS104",
    "input ignored",
    check,
    probes=(CellTrials, OutputLayout, PlainCall, Reach),
    explains=("HS302", "HS404", "HS405", "HS503"),
)
