"""HS105: gradient cut.

Earlier inputs change the output, but no gradient reaches them: the model uses its past and cannot learn to.

**How it is known.** Replaced inputs move the output (as for HS103), and the gradient of the output to them is exactly
zero. For a cell in a loop, the state that enters a step is asked whether it still has the graph with which it left the
step before; a cell of your own is differentiated by itself. Detaching between chunks of several steps is truncation,
and is not told.

**Limit.** Exactly zero.

## Sick

```python
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.cell = nn.GRUCell(3, 8)
        self.head = nn.Linear(8, 2)

    def forward(self, x):
        h = x.new_zeros(len(x), 8)
        for x_t in x.unbind(1):
            h = self.cell(x_t, h.detach())
        return self.head(h)

model = Model()
x = torch.randn(4, 10, 3)
```

## Healthy

```python
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.cell = nn.GRUCell(3, 8)
        self.head = nn.Linear(8, 2)

    def forward(self, x):
        h = x.new_zeros(len(x), 8)
        for x_t in x.unbind(1):
            h = self.cell(x_t, h)
        return self.head(h)

model = Model()
x = torch.randn(4, 10, 3)
```
"""

from __future__ import annotations

import torch

from ..patient import Patient
from ..probes.calls import PlainCall, TracedCall
from ..probes.cells import CellTrials, SteppedCells
from ..probes.gradients import Backward, backward_to_steps
from ..probes.layout import OutputLayout
from ..probes.steps import Reach
from ..rule import Rule, Symptom


def check(patient: Patient) -> Symptom | None:
    """Earlier inputs change the output, but no gradient reaches them."""
    if not _trainable(patient):
        return None
    for trial in patient[CellTrials]:
        if trial.cut:
            return _cut(trial.name, "inside the cell", trial.cut, _line_of_cut(patient))
    for name, steps in patient[SteppedCells].items():
        cuts = steps.detached()
        if cuts and cuts == len(steps.calls) - 1:
            seen = f"the state that enters the cell has no graph at {cuts} of {cuts} steps"
            return _cut(name, "between two steps", seen, _line_of_cut(patient))
    return _whole_cut(patient)


def _whole_cut(patient: Patient) -> Symptom | None:
    """Report earlier steps that move the final output, and get no gradient from it."""
    seen = patient[Reach]
    if not seen.earlier or seen.earlier <= patient.thresholds.reach:
        return None
    found = patient[Backward]
    if not found.connected:
        seen_text = f"earlier steps move the last output by {seen.earlier:.2g} of its size, and it has no graph at all"
        return _cut("the model", "before it is returned", seen_text, _line_of_cut(patient))
    if not found.steps or _reaches_back(found) or _cut_now_and_then(patient):
        return None
    text = f"earlier steps move the last output by {seen.earlier:.2g} of its size, and their gradient is exactly 0"
    return _cut(patient[PlainCall].calls.labels, "between two steps", text, _line_of_cut(patient))


def _reaches_back(found: Backward) -> bool:
    """Whether the gradient of a final output reaches any step before the last."""
    inputs = found.outcome.inputs
    largest = 0.0
    for sizes in found.steps.values():
        if sizes.shape[1] < 2:
            continue
        fits = len(inputs.last) == len(sizes) and sizes.shape[1] == inputs.steps
        ends = inputs.last.clamp(max=sizes.shape[1] - 1) if fits else torch.full((len(sizes),), sizes.shape[1] - 1)
        earlier = torch.arange(sizes.shape[1]).unsqueeze(0) < ends.unsqueeze(1)
        largest = max(largest, float((sizes * earlier).nan_to_num(nan=1.0).max()))
    return largest > 0


def _cut_now_and_then(patient: Patient) -> bool:
    """Whether a cut that the last step begins with is one of every few steps, as truncated backpropagation makes."""
    inputs = patient.inputs
    if inputs.steps < 3:
        return False
    paths = [a.path for a in inputs.arguments if a.time is not None and a.steps == inputs.steps]
    try:
        return _reaches_back(backward_to_steps(patient, inputs.crop(int(inputs.last.max()), paths)))
    except Exception:  # a model of fixed length
        return False


def _trainable(patient: Patient) -> bool:
    mine = [p for layer in patient.layers for p in layer.module.parameters()] or list(patient.model.parameters())
    return any(parameter.requires_grad for parameter in mine)


def _line_of_cut(patient: Patient) -> str:
    """Return the line on which a graph is cut, "" where none is seen."""
    operations = patient[TracedCall].trace.named("detach", "detach_", "get:data", "tensor", "numpy", "item", "tolist")
    return next((operation.line for operation in operations if operation.line), "")


def _cut(where: str, place: str, seen: str, line: str) -> Symptom:
    return Symptom(
        "error",
        f"{where} ({line})" if line else where,
        f"{seen} (limit: above 0).",
        f"the graph is cut {place}: detach(), .data, torch.no_grad(), .item() or torch.tensor(...) on the way",
        "hand the state on as it is: h = self.cell(x_t, h); detach only between batches, outside forward",
        {"gradient": 0.0, "limit": 0.0},
    )


RULE = Rule(
    "HS105",
    "gradient cut",
    check,
    probes=(Backward, CellTrials, OutputLayout, PlainCall, Reach, SteppedCells, TracedCall),
    explains=("HS302", "HS501", "HS503"),
)
