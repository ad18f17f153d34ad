"""HS404: identical across the batch.

Every row has the same states, though the rows of the input differ: the input does not reach the layer.

**How it is known.** A call in which all rows hold different values. Where that is healthy, and half of the rows of
your own batch or more have the same states, a note says so.

**Limit.** `identical = 1e-6`: the spread over rows, relative to the size of the state.

## Sick

```python
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(3, 8, batch_first=True)
        self.head = nn.Linear(8, 2)
        nn.init.zeros_(self.lstm.weight_ih_l0)

    def forward(self, x):
        return self.head(self.lstm(x)[0]) + x.mean(-1, keepdim=True)

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
        return self.head(self.lstm(x)[0]) + x.mean(-1, keepdim=True)

model = Model()
x = torch.randn(4, 10, 3)
```
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...state import tensors
from ..advice import drawn_anew, path_of
from ..inputs import ModelInputs
from ..outcome import Operation, Operations
from ..patient import Patient
from ..probes.states import IdenticalRows, RecordedStates
from ..rule import Rule, Symptom


def check(patient: Patient) -> Symptom | None:
    """Every row has the same states, though rows of the input differ."""
    seen, limit = patient[IdenticalRows], patient.thresholds.identical
    if not seen.track:
        return _same_input(patient)
    chosen, cause, advice = _cause(patient, seen.track)
    return Symptom(
        "note" if chosen else "warning",
        seen.track,
        f"the states of {seen.rows} rows with different input differ by {seen.spread:.2g} of their size at most "
        f"(limit {limit:.0e}).",
        cause,
        advice,
        {"spread": seen.spread, "limit": limit},
    )


def _cause(patient: Patient, track: str) -> tuple[bool, str, str]:
    """Return whether a choice made rows alike, where what tells them apart is lost, and what to write there."""
    everywhere = torch.ones(patient.inputs.batch, dtype=torch.bool)
    run = patient.run(patient.inputs.other_rows(everywhere, seed=101), trace=True, collect=True)
    layer = next((each for each in patient.layers if not each.name or track.startswith(each.name)), None)
    calls = [] if layer is None else run.calls.of(layer)
    look = "with hs.record(model) as rec: model(x)  # shows what enters the layer"
    if layer is None or not calls:
        return False, "what tells rows apart does not reach the state", look
    name = path_of("self", layer.name)
    if not _alike_rows(calls[0].x):
        return (
            False,
            "rows differ where they enter the layer, and not behind it: its weights for the input are zero, or far too "
            "small",
            drawn_anew(layer),
        )
    for operation in _behind(run.trace, calls[0].input):
        line = f" ({operation.line})" if operation.line else ""
        if operation.name in _CHOICES:
            cause = f"every row has made the same choice: `{operation.name}`{line} gives one token for all of them"
            return True, cause, f"# train further; or hand on what it chose from: {name}(logits.softmax(-1) @ table)"
        apart = any(not _alike_rows(t) for t in operation.inputs if t.shape[:1] == (patient.inputs.batch,))
        if apart or not operation.inputs:
            lost = "gives the same for rows that differ" if apart else "is made of no input"
            return (
                False,
                f"what enters the layer is the same for all rows: `{operation.name}`{line} {lost}",
                f"{name}(x)  # with x itself, or what is made of it row by row",
            )
    return False, "what enters the layer is the same for all rows: a constant is fed in the place of the input", look


_CHOICES = ("argmax", "argmin", "topk", "multinomial")


def _behind(trace: Operations, fed: Any) -> list[Operation]:
    """Return the operations that made what is fed, the last first."""
    made, waiting = trace.makers(), list(tensors(fed).values())
    found: list[Operation] = []
    while waiting:
        operation = made.get(id(waiting.pop(0)))
        if operation is not None and operation not in found:
            found.append(operation)
            waiting.extend(operation.inputs)
    return found


def _alike_rows(values: Tensor) -> bool:
    return values.dim() < 2 or bool((values == values[:1]).all())


def _same_input(patient: Patient) -> Symptom | None:
    """Note that most rows of the batch are one and the same sequence."""
    inputs = patient.inputs
    if not inputs.batched or inputs.batch < 3 or inputs.steps < 2:
        return None
    for name, track in patient[RecordedStates].finite().items():
        if len(track.h) != inputs.batch or not bool(track.h.any()):
            continue
        _, counts = torch.unique(track.h.flatten(1), dim=0, return_counts=True)
        most = int(counts.max())
        if most >= 3 and 2 * most >= inputs.batch and _alike(inputs) < most:
            return Symptom(
                "warning",
                name,
                f"{most} of {inputs.batch} rows of the batch have the same states at all steps, and {_alike(inputs)} "
                f"the same input (limit: as many).",
                "what tells rows apart is lost before the layer: rounded away by .long(), clamped, or masked",
                "with hs.record(model) as rec: model(x)  # shows what enters the layer: fractions need nn.Linear",
                {"rows": inputs.batch, "identical": most},
            )
        if most >= 3 and 2 * most >= inputs.batch:
            return Symptom(
                "note",
                name,
                f"{most} of {inputs.batch} rows of the batch have the same states at all steps (limit: half of them).",
                "the batch holds one sequence several times: expanded, repeated or drawn again, or it is constant",
                "# look at the batch: torch.unique(x, dim=0).shape; rows that are alike teach and tell nothing more",
                {"rows": inputs.batch, "identical": most},
            )
    return None


def _alike(inputs: ModelInputs) -> int:
    """Return how many rows of the main input are one and the same."""
    x, axis = inputs.get(inputs.main), inputs.argument(inputs.main).rows
    if not isinstance(x, Tensor) or axis is None:
        return inputs.batch
    _, counts = torch.unique(x.movedim(axis, 0).flatten(1), dim=0, return_counts=True)
    return int(counts.max())


RULE = Rule("HS404", "identical across the batch", check, probes=(IdenticalRows, RecordedStates))
