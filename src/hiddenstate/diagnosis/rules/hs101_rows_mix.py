"""HS101: samples of a batch influence each other.

An output row follows input rows that are not its own: a sample's prediction depends on which others happen to be in its
batch. The commonest cause is a forgotten `batch_first=True`, by which the rows of the batch become steps in time.

**How it is known.** Rows of the input are replaced, half of them at a time in a pattern that tells any two rows apart,
and all rows of all outputs are compared with the plain call. In a healthy model a row that was not touched does not
change by a single bit. This is done in eval mode, where BatchNorm uses running statistics. Where rows and steps share
one axis of the output, both orders are tried. An operation-by-operation comparison then names the line where rows first
meet.

**Limit.** `leak = 1e-4`: a foreign change, relative to the largest change of all.

## Sick

```python
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(3, 8)
        self.head = nn.Linear(8, 2)

    def forward(self, x):
        out, _ = self.lstm(x)            # (batch, time, feature) read as (time, batch, feature)
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

If your data really are `(time, batch, feature)`, say so: `hs.diagnose(model, x, batch_axis=1)`. A BatchNorm without
running statistics gives a note only, and so does an input of two axes, which may be one sequence or a table of samples.
"""

from __future__ import annotations

from torch import nn

from ...state import spelled
from ..patient import Patient
from ..probes.calls import PlainCall
from ..probes.rows import MisreadLayer, RowInfluences, RowlessOutput, RowMixing
from ..rule import Rule, Symptom


def check(patient: Patient) -> Symptom | None:
    """An output row follows an input row that is not its own."""
    if patient.unbatched and not isinstance(patient.model, nn.RNNBase):
        return _perhaps_steps(patient)
    found = [influence for influence in patient[RowInfluences] if influence.leaks]
    if not found:
        return _without_rows(patient)
    worst = max(found, key=lambda influence: influence.share)
    if worst.permuted:
        return None  # every row is whole, though in another place: HS110
    where, cause, advice = _place(patient)
    evidence = (
        f"output{spelled(worst.leaf.path)} row {worst.row} changed when only other rows of the input did, by "
        f"{worst.share:.2g} of the largest change (limit {worst.limit:.1g}); so did {worst.others} of "
        f"{patient.inputs.batch} rows. Eval mode."
    )
    batch_norm = any(
        isinstance(m, nn.modules.batchnorm._BatchNorm) and m.running_mean is None for m in patient.model.modules()
    )
    return Symptom(
        "note" if batch_norm else "error",
        where,
        evidence,
        "a BatchNorm without running statistics uses those of the batch, also in eval mode" if batch_norm else cause,
        advice,
        {"share": worst.share, "limit": worst.limit, "rows": worst.others},
    )


def _perhaps_steps(patient: Patient) -> Symptom:
    """An input of two axes was read as one sequence: right for one sequence, wrong for a table of samples."""
    call = patient[PlainCall].calls[0]
    rows = patient.inputs.steps
    return Symptom(
        "note",
        call.layer.label,
        f"the {rows} rows of the input were read as {rows} steps of 1 sequence, since it has no axis for time.",
        "right for one sequence without a batch; wrong where each row is a sample of its own",
        "x.unsqueeze(1) makes each row a sequence of one step, x.unsqueeze(0) makes the whole a batch of one",
        {"rows": rows},
    )


def _place(patient: Patient) -> tuple[str, str, str]:
    """Return where rows meet, why, and what to change."""
    layer = patient[MisreadLayer].layer
    if layer is not None:
        first = layer.spec.batch_first
        kind = f"nn.{type(layer.module).__name__}" if isinstance(layer.module, nn.RNNBase) else layer.kind
        fix = (
            f"{kind}(..., batch_first=True), and take the last step as out[:, -1]"
            if not first
            else f"{kind}(..., batch_first=False), or x.transpose(0, 1) before it"
        )
        return (
            layer.label,
            f"the layer has batch_first={first}, so it reads the {patient.inputs.batch} rows as steps in time",
            f"{fix}. If the input is (time, batch, feature) on purpose: hs.diagnose(..., batch_axis=1).",
        )
    mixing = patient[RowMixing]
    name = mixing.name
    if mixing.reshapes:
        return (
            mixing.where,
            f"`{name}` joins rows and steps that are not neighbors in memory: it does not swap axes",
            "swap axes with x.transpose(0, 1) (or permute), and only then view or reshape; for h_n: "
            "h_n.transpose(0, 1).reshape(batch, -1)",
        )
    if mixing.softmax:
        return mixing.where, f"`{name}` runs over the batch axis", f"torch.{name}(logits, dim=-1)"
    what = f"`{name}` is the first operation that lets rows meet" if name else "some operation lets rows meet"
    return (
        mixing.where,
        f"{what}; usually a mean, norm, softmax or reshape over the batch axis",
        "let it run over the last axis: dim=-1, and swap axes with transpose, not view",
    )


def _without_rows(patient: Patient) -> Symptom | None:
    """Report an output that has no axis for the rows at all."""
    evidence = patient[RowlessOutput].evidence
    if not evidence:
        return None
    where, cause, advice = _place(patient)
    if patient[MisreadLayer].layer is None:
        cause = "an index meant for the steps took a row of the batch, as out[-1] does on (batch, time, unit)"
        advice = "out[:, -1] takes the last step of every row"
    return Symptom("error", where, evidence, cause, advice, {"axes": 0})


RULE = Rule(
    "HS101",
    "samples of a batch influence each other",
    check,
    probes=(MisreadLayer, PlainCall, RowInfluences, RowMixing, RowlessOutput),
    explains=(
        *("HS102", "HS103", "HS104", "HS105", "HS106", "HS107", "HS108"),
        *("HS110", "HS302", "HS404", "HS405", "HS501", "HS502", "HS503"),
    ),
)
