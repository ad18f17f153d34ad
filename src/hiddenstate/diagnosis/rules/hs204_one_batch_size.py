"""HS204: one batch size only.

The model runs with the number of rows it was given, and with no other. The last batch of an epoch is often smaller, and
in production there is one row.

**How it is known.** The call is repeated with one row less, and with one row. Both must run and have the shape that one
expects; `squeeze()` without an axis drops the batch axis once it has one row.

**Limit.** Any number of rows.

## Sick

```python
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(3, 8, batch_first=True)
        self.head = nn.Linear(8, 2)

    def forward(self, x):
        h0 = torch.zeros(1, 4, 8)
        out, _ = self.lstm(x, (h0, h0))
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
        h0 = x.new_zeros(1, x.size(0), 8)
        out, _ = self.lstm(x, (h0, h0))
        return self.head(out[:, -1])

model = Model()
x = torch.randn(4, 10, 3)
```
"""

from __future__ import annotations

import re

from ...state import tensors
from ..patient import Patient
from ..probes.layout import OutputLayout
from ..rule import Rule, Symptom


def check(patient: Patient) -> Symptom | None:
    """The model runs with the rows it was given, and with no other number of them."""
    inputs = patient.inputs
    if not inputs.batched or inputs.batch < 2:
        return None
    for count in dict.fromkeys((inputs.batch - 1, 1)):
        try:
            run = patient.run(inputs.select(range(count)))
        except Exception as error:  # the finding itself
            return _one_size(patient, count, f"{count} rows raise {type(error).__name__}: {_short(error)}")
        if count > 1:
            continue
        results = tensors(run.result)  # where one number has no axis left
        for leaf in patient[OutputLayout].leaves:
            if leaf.rows is None or leaf.merged or leaf.path not in results:
                continue
            expected = [1 if axis == leaf.rows else size for axis, size in enumerate(leaf.shape)]
            seen = tuple(results[leaf.path].shape)
            if len(seen) < len(expected):
                return _one_size(patient, 1, f"1 row gives shape {seen} instead of {tuple(expected)}", squeezed=True)
    return None


def _another_size(patient: Patient, error: str) -> Symptom | None:
    """Report a model that fails with the rows it was given, and runs with some other number of them."""
    inputs = patient.inputs
    if not inputs.batched:
        return None
    named = [v for m in patient.model.modules() for k, v in vars(m).items() if "batch" in k.lower() and type(v) is int]
    numbers = [int(number) for number in re.findall(r"\d+", error)]
    for count in dict.fromkeys([*named, *numbers]):
        if not 0 < count <= 4096 or count == inputs.batch:
            continue
        try:
            patient.run(inputs.select([row % inputs.batch for row in range(count)]))
        except Exception:  # not this one
            continue
        return _one_size(patient, count, f"and {count} rows run", runs=False)
    return None


def _one_size(patient: Patient, count: int, seen: str, *, squeezed: bool = False, runs: bool = True) -> Symptom:
    cause = (
        "squeeze() without an axis drops the batch axis as well once it has one row"
        if squeezed
        else "a state or a reshape is made for a fixed number of rows; the last batch of an epoch is often smaller"
    )
    advice = (
        "name the axis: out.squeeze(-1)"
        if squeezed
        else "make the state from the input: h0 = x.new_zeros(layers, x.size(0), units), or pass none at all"
    )
    return Symptom(
        "warning" if squeezed else "error",
        "the model",
        f"{patient.inputs.batch} rows {'run' if runs else 'do not run'}, {seen} (needed: any number of rows).",
        cause,
        advice,
        {"rows": count},
    )


def _short(error: Exception) -> str:
    text = str(error).strip().splitlines()
    return text[0][:160] if text else ""


RULE = Rule("HS204", "one batch size only", check, probes=(OutputLayout,), check_failure=_another_size)
