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
from ..outcome import line_of
from ..patient import Patient
from ..probes.calls import OutputLayout, TracedCall
from ..rule import Rule, Symptom
from ..wrong_state import wrong_state


def check(patient: Patient) -> Symptom | None:
    """The model runs with the rows it was given, and with no other number of them."""
    inputs = patient.inputs
    if not inputs.batched or inputs.batch < 2:
        return None
    for count in dict.fromkeys((inputs.batch - 1, 1)):
        try:
            run = patient.run(inputs.select(range(count)))
        except Exception as error:  # the finding itself
            raised = f"{count} rows raise {type(error).__name__}: {_short(error)}"
            return _one_size(patient, count, raised, line=line_of(error))
        if count > 1:
            continue
        results = tensors(run.result)  # where one number has no axis left
        for leaf in patient[OutputLayout].leaves:
            if leaf.rows is None or leaf.merged or leaf.path not in results:
                continue
            expected = [1 if axis == leaf.rows else size for axis, size in enumerate(leaf.shape)]
            seen = tuple(results[leaf.path].shape)
            if len(seen) < len(expected):
                return _one_size(
                    patient,
                    1,
                    f"1 row gives shape {seen} instead of {tuple(expected)}",
                    squeezed=_squeezed_axis(patient),
                )
    return None


def _another_size(patient: Patient, error: str) -> Symptom | None:
    """Report a model that fails with the rows it was given, and runs with some other number of them."""
    inputs = patient.inputs
    if not inputs.batched:
        return None
    state = wrong_state(patient)
    if state is not None:
        return state
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


def _one_size(
    patient: Patient, count: int, seen: str, *, squeezed: str = "", runs: bool = True, line: str = ""
) -> Symptom:
    cause = "a number of rows is written down: the last batch of an epoch is often smaller"
    advice = "take it from the input: range(x.size(0)), out.reshape(x.size(0), -1), x.new_zeros(1, x.size(0), units)"
    rows = patient.inputs.batch
    learned = [n for n, p in patient.model.named_parameters() if p.dim() == 3 and p.shape[1] == rows and p.shape[0] < 5]
    if learned:
        name = learned[0].rpartition(".")[2]
        cause = f"the learned first state {learned[0]} has {rows} rows of its own"
        advice = (
            f"self.{name} = nn.Parameter(torch.zeros(1, 1, n)), and self.{name}.expand(-1, x.size(0), -1).contiguous()"
        )
    if squeezed:
        cause = "squeeze() without an axis drops the batch axis as well once it has one row"
        advice = f"name the axis: out.squeeze({squeezed})"
    return Symptom(
        "warning" if squeezed else "error",
        line or "the model",
        f"{rows} rows {'run' if runs else 'do not run'}, {seen} (needed: any number of rows).",
        cause,
        advice,
        {"rows": count},
    )


def _squeezed_axis(patient: Patient) -> str:
    """Return the axis that a squeeze without one drops when there are several rows."""
    for operation in patient[TracedCall].trace.named("squeeze"):
        if len(operation.args) == 1 and not operation.kwargs and operation.inputs:
            ones = [axis for axis, size in enumerate(operation.inputs[0].shape) if size == 1]
            return str(ones[0] if ones and ones[0] == 0 else -1)
    return "-1"


def _short(error: Exception) -> str:
    text = str(error).strip().splitlines()
    return text[0][:160] if text else ""


RULE = Rule("HS204", "one batch size only", check, probes=(OutputLayout, TracedCall), check_failure=_another_size)
