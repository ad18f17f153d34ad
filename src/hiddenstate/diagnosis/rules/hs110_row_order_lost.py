"""HS110: row order lost around packing.

Rows were sorted by length for packing, and the outputs were never put back in order: predictions and targets no longer
belong together.

**How it is known.** Each output row follows exactly one input row, and not its own; and moving the rows of the input
must move those of the output. The second also works on data that are sorted already, where the mistake leaves no trace.

**Limit.** `1e-3` of the output's size.

## Sick

```python
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.gru = nn.GRU(3, 8, batch_first=True)
        self.head = nn.Linear(8, 2)

    def forward(self, x, lengths):
        lengths, order = lengths.sort(descending=True)
        packed = pack_padded_sequence(x[order], lengths, batch_first=True)
        _, h_n = self.gru(packed)
        return self.head(h_n[-1])

model = Model()
x = torch.randn(4, 10, 3)
lengths = torch.tensor([4, 10, 2, 7])
inputs = (x, lengths)
options = {"lengths": lengths}
```

## Healthy

```python
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.gru = nn.GRU(3, 8, batch_first=True)
        self.head = nn.Linear(8, 2)

    def forward(self, x, lengths):
        packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        _, h_n = self.gru(packed)
        return self.head(h_n[-1])

model = Model()
x = torch.randn(4, 10, 3)
lengths = torch.tensor([4, 10, 2, 7])
inputs = (x, lengths)
options = {"lengths": lengths}
```
"""

from __future__ import annotations

import torch

from ..difference import change
from ..patient import Patient
from ..probes.calls import TracedCall
from ..probes.layout import OutputLayout, by_rows
from ..probes.rows import RowInfluences
from ..rule import Rule, Symptom


def check(patient: Patient) -> Symptom | None:
    """Output rows are those of the input, but in another order."""
    inputs = patient.inputs
    for influence in patient[RowInfluences]:
        if influence.leaks and influence.permuted and influence.sources is not None:
            row = next(i for i, source in enumerate(influence.sources) if i != source)
            return _lost(patient, f"output row {row} follows input row {influence.sources[row]} and no other", 1.0)
    lengths_in = [argument for argument in inputs.arguments if argument.kind == "lengths" and argument.rows is not None]
    if not inputs.batched or inputs.batch < 3 or any(i.leaks for i in patient[RowInfluences]) or not lengths_in:
        return None
    return _after_permuting(patient)


def _after_permuting(patient: Patient) -> Symptom | None:
    """Report outputs that stay behind when the rows of the input, of unequal lengths, are moved by one place."""
    inputs = patient.inputs
    spread = torch.linspace(max(1, inputs.steps // 3), inputs.steps, inputs.batch).long()
    lengths = inputs.lengths if inputs.lengths is not None and len(set(inputs.lengths.tolist())) > 1 else spread
    falling = lengths.sort(descending=True).values
    ordered = inputs.with_lengths(falling)
    order = torch.arange(inputs.batch).roll(1)
    try:
        before = patient.run(ordered)
        after = patient.run(ordered.select(order.tolist()))
    except Exception:  # a model that wants its rows sorted by length refuses others, and says so itself
        return None
    for leaf in patient[OutputLayout].leaves:
        if leaf.rows is None or leaf.path not in before.outputs or leaf.path not in after.outputs:
            continue
        old, new = (by_rows(run.outputs[leaf.path], leaf, inputs.batch) for run in (before, after))
        if old.shape != new.shape:
            continue
        moved, still = change(old[order], new), change(old, new)
        size = float(old.abs().nan_to_num(posinf=0.0).max()) or 1.0
        if float(moved.max()) > 1e-3 * size and float(change(old[order], old).max()) > 1e-3 * size:
            what = "are where they were" if float(still.max()) <= 1e-4 * size else "do not follow"
            return _lost(
                patient,
                f"with the rows of the input moved by one, those of the output {what}",
                float(moved.max()) / size,
            )
    return None


def _lost(patient: Patient, seen: str, number: float) -> Symptom:
    sorts = patient[TracedCall].trace.named("sort", "argsort")
    return Symptom(
        "error",
        next((operation.line for operation in sorts if operation.line), "the model"),
        f"{seen} ({number:.2g} of the output's size, limit 0.001).",
        "the rows were sorted by length for packing, and the result was never put back in order",
        "pack_padded_sequence(x, lengths.cpu(), batch_first=True, enforce_sorted=False) keeps the order by itself; "
        "otherwise out[order.argsort()]",
        {"share": number, "limit": 1e-3},
    )


RULE = Rule(
    "HS110",
    "row order lost around packing",
    check,
    probes=(OutputLayout, RowInfluences, TracedCall),
    explains=("HS101", "HS106", "HS204"),
)
