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
from ..probes.rows import ForeignMarks, MisreadLayer, RowInfluences, RowlessOutput, RowMixing, StateInfluences
from ..rule import Rule, Symptom


def check(patient: Patient) -> Symptom | None:
    """An output row follows an input row that is not its own."""
    if patient.unbatched and not isinstance(patient.model, nn.RNNBase):
        return _perhaps_steps(patient)
    found = [influence for influence in patient[RowInfluences] if influence.leaks]
    if not found:
        return _without_rows(patient) or _in_the_states(patient) or _by_marks(patient)
    worst = max(found, key=lambda influence: influence.share)
    if worst.permuted:
        return None  # every row is whole, though in another place: HS110
    where, cause, advice = _place(patient)
    evidence = (
        f"output{spelled(worst.leaf.path)} row {worst.row} changed when only other rows of the input did, by "
        f"{worst.share:.2g} of the largest change (limit {patient.thresholds.leak:.0e}); so did {worst.others} of "
        f"{patient.inputs.batch} rows. Eval mode."
    )
    batch_norm = any(
        isinstance(m, nn.modules.batchnorm._BatchNorm) and m.running_mean is None for m in patient.model.modules()
    )
    if patient.quantized:
        cause = "the scale of eight bits is taken from the values of all rows of the batch"
        advice = "torch.ao.quantization.quantize(...) with scales from data that were kept, where rows must not matter"
    return Symptom(
        "note" if batch_norm or patient.quantized else "error",
        where,
        evidence,
        "a BatchNorm without running statistics uses those of the batch, also in eval mode" if batch_norm else cause,
        advice,
        {"share": worst.share, "limit": patient.thresholds.leak, "rows": worst.others},
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
    cause, advice = _by_operation(patient, mixing)
    return mixing.where, cause, advice


def _by_operation(patient: Patient, mixing: RowMixing) -> tuple[str, str]:
    """Return what an operation does to the rows, and what to write in its place."""
    name, shape, steps = mixing.name, mixing.shape, patient.inputs.steps
    if name in _RESHAPES:
        return (
            f"`{name}` joins rows and steps that are not neighbors in memory: it does not swap axes",
            "swap axes with x.transpose(0, 1) (or permute), and only then view or reshape; for h_n: "
            "h_n.transpose(0, 1).reshape(batch, -1)",
        )
    if name in _TAKES:
        return (
            f"`{name}` takes single rows of the batch, as if its first axis were time or one row stood for all",
            "x[:, t] takes step t of all rows: for t in range(x.size(1)): h = self.cell(x[:, t], h). If the input is "
            "(time, batch, feature) on purpose: hs.diagnose(..., batch_axis=1).",
        )
    # Over the last axis, or where that has a single entry, as scores of attention do, over the steps.
    axis = 1 if len(shape) > 2 and shape[-1] == 1 and shape[1] == steps else -1
    if name in ("softmax", "log_softmax", "sparsemax"):
        return f"`{name}` runs over the rows of the batch", f"torch.{name}(logits, dim={axis})"
    if name in ("batch_norm", "instance_norm"):
        return (
            f"`{name}` uses the statistics of this batch, in eval mode too",
            "nn.LayerNorm(units) in its place, or F.batch_norm(..., training=self.training) with running statistics",
        )
    if name in _STATISTICS:
        alone = len(shape) > 1 and shape[-1] == 1
        return (
            f"`{name}` runs over the rows of the batch",
            "numbers of the training data in its place, kept as buffers: (x - self.mean) / self.std"
            if alone
            else f"x.{name}(dim=-1, keepdim=True) within each row, or numbers of the training data, kept as buffers",
        )
    what = f"`{name}` is the first operation that lets rows meet" if name else "some operation lets rows meet"
    advice = "keep rows apart: each operation over axis 1 or later, and x.transpose(0, 1) before one that wants it"
    if patient.inputs.argument(patient.inputs.main).rows == 0 and steps > 1:
        advice += ". If the input is (time, batch, feature) on purpose: hs.diagnose(..., batch_axis=1)."
    return what, advice


_RESHAPES = ("view", "reshape", "flatten", "unflatten", "view_as")
_TAKES = ("__getitem__", "select", "unbind", "__iter__", "index_select")
_STATISTICS = ("mean", "std", "var", "norm", "max", "min", "amax", "amin", "sum", "median", "std_mean", "var_mean")


def _in_the_states(patient: Patient) -> Symptom | None:
    """Report states that mix rows, where nothing of it is left in the output."""
    if not patient[StateInfluences]:
        return None
    worst = max(patient[StateInfluences], key=lambda influence: influence.share)
    mixing = patient[RowMixing]
    cause, advice = _by_operation(patient, mixing)
    limit = patient.thresholds.leak
    return Symptom(
        "error",
        f"{worst.layer} ({mixing.line})" if mixing.line else worst.layer,
        f"row {worst.row} of its states changed when only other rows of the input did, by {worst.share:.2g} of the "
        f"largest change (limit {limit:.0e}); so did {worst.others} of {patient.inputs.batch} rows. In the output it "
        f"has faded. Eval mode.",
        cause,
        advice,
        {"share": worst.share, "limit": limit, "rows": worst.others},
    )


def _by_marks(patient: Patient) -> Symptom | None:
    """Report marks of one row that act on others, as whole numbers do that are taken for an index."""
    seen = patient[ForeignMarks]
    if not seen.name:
        return None
    limit = patient.thresholds.leak
    return Symptom(
        "error",
        seen.name,
        f"output row {seen.row} changed when only `{seen.name}` of other rows did, by {seen.share:.2g} of the output's "
        f"size (limit {limit:.0e}). Eval mode.",
        f"whole numbers are an index: h[:, {seen.name}] takes rows 0 and 1, whichever rows are marked"
        if seen.whole
        else "what is said of one row is applied to others",
        f"h = h * (1 - {seen.name}.float()).view(1, -1, 1), or h[:, {seen.name}.bool()] = 0 on a clone of h",
        {"share": seen.share, "limit": limit},
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
    probes=(ForeignMarks, MisreadLayer, PlainCall, RowInfluences, RowMixing, RowlessOutput, StateInfluences),
    explains=(
        *("HS102", "HS103", "HS104", "HS105", "HS106", "HS107", "HS108"),
        *("HS110", "HS302", "HS404", "HS405", "HS501", "HS502", "HS503"),
    ),
)
