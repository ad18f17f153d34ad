"""HS111: rows must come sorted by length.

`pack_padded_sequence` takes rows sorted by length, the longest first, unless it is told otherwise. The model runs on a
batch that happens to be so and fails on the next one.

**How it is known.** A model that fails is run with its rows sorted by length, and runs. One that runs is given its rows
the shortest first, and fails. Where all lengths are alike, other lengths are made up. It is a note where the sorting is
somebody's plan: the code says `enforce_sorted=True` in so many words, or so many rows come sorted that chance would
hardly have it.

**Limit.** Any order of rows; `by_chance = 0.01`: five rows of different lengths come sorted in one batch of 120.

## Sick

```python
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(3, 8, batch_first=True)
        self.head = nn.Linear(8, 2)

    def forward(self, x, lengths):
        _, (h, _) = self.lstm(pack_padded_sequence(x, lengths, batch_first=True))
        return self.head(h[-1])

model = Model()
inputs = torch.randn(4, 10, 3), torch.tensor([5, 10, 3, 7])
```

## Healthy

```python
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(3, 8, batch_first=True)
        self.head = nn.Linear(8, 2)

    def forward(self, x, lengths):
        packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        _, (h, _) = self.lstm(packed)
        return self.head(h[-1])

model = Model()
inputs = torch.randn(4, 10, 3), torch.tensor([5, 10, 3, 7])
```
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from ..inputs import ModelInputs
from ..outcome import line_of
from ..patient import Patient
from ..rule import Rule, Severity, Symptom
from ..source import raised_at, says


def check(patient: Patient) -> Symptom | None:
    """The model takes rows the longest first, and in no other order."""
    inputs, known = patient.inputs, patient.inputs.known_lengths()
    told = any(a.real is not None or (a.kind == "lengths" and a.rows is not None) for a in inputs.arguments)
    told = told or bool(inputs.ragged)  # sequences of their own lengths
    if known is None or not told or not inputs.batched or inputs.batch < 2 or inputs.steps < 2:
        return None
    differ = len(set(known.tolist())) > 1
    if not differ:
        known = torch.linspace(max(1, inputs.steps // 3), inputs.steps, inputs.batch).long()
        inputs = inputs.with_lengths(known)
    falling = known.argsort(descending=True, stable=True).tolist()
    if _failure(patient, inputs.select(falling)) is not None:
        return None  # it fails for another reason
    error = _failure(patient, inputs.select(falling[::-1]))
    if error is None:
        return None
    by_plan = differ and _sorted_on_purpose(patient)
    said = says(*raised_at(error, "pack_padded_sequence"), "enforce_sorted")
    return _symptom(
        f"{inputs.batch} rows run the longest first, and raise {type(error).__name__} the shortest first "
        f"(needed: any order).",
        line_of(error),
        "note" if by_plan or said else "warning",
        "it is packed with enforce_sorted=True: the rows are sorted elsewhere, and no other caller can know that"
        if said
        else _CAUSE,
    )


def _sorted_on_purpose(patient: Patient) -> bool:
    """Say whether all rows that the user gave come the longest first, and are too many for that to be chance."""
    given = patient.given.known_lengths()
    lengths = [] if given is None else given.tolist()
    if lengths != sorted(lengths, reverse=True):
        return False
    return 1 / math.factorial(len(set(lengths))) < patient.thresholds.by_chance


def _failing(patient: Patient, _: str) -> Symptom | None:
    """Report a model that fails with the rows as they are, and runs with the longest first."""
    inputs = patient.inputs
    error = _failure(patient, inputs)
    for lengths in _told_lengths(inputs) if inputs.batched and error is not None else ():
        order = lengths.argsort(descending=True, stable=True).tolist()
        if order != sorted(order) and _failure(patient, inputs.select(order)) is None:
            raised = type(error).__name__
            return _symptom(
                f"lengths {lengths.tolist()} raise {raised}, and {lengths[order].tolist()} run (needed: any order).",
                line_of(error) if error is not None else "",
                "error",
            )
    return None


def _told_lengths(inputs: ModelInputs) -> Iterator[Tensor]:
    """Yield what may be the lengths of the rows: those of sequences in a list, and whole numbers beside them."""
    if inputs.ragged and inputs.lengths is not None:
        yield inputs.lengths
    for argument in inputs.arguments:
        end = inputs.get(argument.path)
        whole = isinstance(end, Tensor) and end.dim() == 1 and not end.is_floating_point()
        if argument.rows is not None and (whole or isinstance(end, list | tuple)):
            yield torch.as_tensor(end).cpu()


def _failure(patient: Patient, inputs: ModelInputs) -> Exception | None:
    try:
        patient.run(inputs)
    except Exception as error:  # what it refuses is what is asked
        return error
    return None


_CAUSE = "rows are packed as if they were sorted by length: enforce_sorted=True is what torch does if nothing is said"


def _symptom(evidence: str, where: str, severity: Severity, cause: str = _CAUSE) -> Symptom:
    return Symptom(
        severity,
        where or "the model",
        evidence,
        cause,
        "pack_padded_sequence(x, lengths.cpu(), batch_first=True, enforce_sorted=False)",
        {"orders": 1.0},
    )


RULE = Rule("HS111", "rows must come sorted by length", check, check_failure=_failing)
