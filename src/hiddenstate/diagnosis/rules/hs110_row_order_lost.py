"""HS110: row order lost around packing.

Rows were sorted by length for packing, and the outputs were never put back in order: predictions and targets no longer
belong together.

**How it is known.** Each output row follows exactly one input row, and not its own; and moving the rows of the input
must move those of the output. The second also works on data that are sorted already, where the mistake leaves no trace.
Where a model sorts several inputs, rows that follow others have to keep apart once all lengths come sorted.

**Limit.** `row_order = 1e-3` of the output's size.

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
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from ..outcome import change
from ..patient import Patient
from ..probes.calls import OtherSeed, OutputLayout, TracedCall, attempt, by_rows
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
    if not inputs.batched or inputs.batch < 3 or not lengths_in:
        return None
    leaking = next((i for i in patient[RowInfluences] if i.leaks), None)
    if leaking is not None:
        apart = patient[TracedCall].trace.named(*_SORTS) and _apart_when_sorted(patient)
        seen = (
            f"output row {leaking.row} follows rows that are not its own, and none do where they come sorted by length"
        )
        return _lost(patient, seen, leaking.share) if apart else None
    if patient[OtherSeed].gap > 0:
        return None  # what is drawn stays where it was when the rows are moved
    return _after_permuting(patient)


_SORTS = ("sort", "argsort", "topk")


def _apart_when_sorted(patient: Patient) -> bool:
    """Whether all rows keep apart where whatever may be their lengths has the longest first."""
    inputs = patient.inputs
    for argument in inputs.arguments:
        end = inputs.get(argument.path)
        if argument.kind not in ("lengths", "other") or argument.rows is None or not isinstance(end, Tensor | list):
            continue
        values = torch.as_tensor(end)
        if values.dim() == 1 and not values.is_floating_point():
            falling = values.sort(descending=True).values
            inputs = inputs.put(argument.path, falling if isinstance(end, Tensor) else falling.tolist())
    half = torch.arange(inputs.batch) < inputs.batch // 2
    before, after = attempt(patient, inputs), attempt(patient, inputs.other_rows(half, seed=7))
    if before is None or after is None:
        return False
    leaves = [leaf for leaf in patient[OutputLayout].leaves if leaf.rows is not None]
    for leaf in leaves:
        old, new = (run.outputs.get(leaf.path) for run in (before, after))
        if old is None or new is None or old.shape != new.shape:
            return False
        gaps = change(by_rows(old, leaf, inputs.batch), by_rows(new, leaf, inputs.batch)).flatten(1).amax(1)
        if not bool(gaps[half].any()) or float(gaps[~half].max()) > patient.thresholds.leak * float(gaps.max()):
            return False
    return bool(leaves)


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
        limit = patient.thresholds.row_order * size
        if float(moved.max()) > limit and float(change(old[order], old).max()) > limit:
            what = "are where they were" if float(still.max()) <= 1e-4 * size else "do not follow"
            return _lost(
                patient,
                f"with the rows of the input moved by one, those of the output {what}",
                float(moved.max()) / size,
            )
    return None


def _lost(patient: Patient, seen: str, number: float) -> Symptom:
    sorts = patient[TracedCall].trace.named(*_SORTS)
    packed = [call.input for call in patient[TracedCall].calls if isinstance(call.input, PackedSequence)]
    lost = [p for p in packed if p.unsorted_indices is None]
    rebuilt = bool(lost) and len(lost) < len(packed)  # one of several has its indices no more
    if rebuilt:
        cause = "a PackedSequence is made anew from its data and batch_sizes: the indices that put rows back are lost"
        advice = "packed = packed._replace(data=self.dropout(packed.data))  # keeps sorted_indices and unsorted_indices"
    elif not sorts and not packed:
        cause = "the rows come out in another order than they went in: a flip, roll or index over the batch axis"
        advice = "out.flip(1) turns the steps round; axis 0 of (batch, time, unit) holds the rows"
    else:
        cause = "the rows are put in another order for packing, and its inverse is not what the result goes through"
        advice = (
            "out[order.argsort()] puts rows back that x[order] has moved; or let torch do both: "
            "pack_padded_sequence(x, lengths.cpu(), batch_first=True, enforce_sorted=False)"
        )
    limit = patient.thresholds.row_order
    return Symptom(
        "error",
        next((operation.line for operation in sorts if operation.line), "the model"),
        f"{seen} ({number:.2g} of the output's size, limit {limit:g}).",
        cause,
        advice,
        {"share": number, "limit": limit},
    )


RULE = Rule(
    "HS110",
    "row order lost around packing",
    check,
    probes=(OtherSeed, OutputLayout, RowInfluences, TracedCall),
    explains=("HS101", "HS106", "HS204"),
)
