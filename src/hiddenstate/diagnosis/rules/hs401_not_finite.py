"""HS401: NaN or Inf.

NaN or Inf in a parameter, in what enters a layer, in a state, in the output, or in a gradient. The first layer, row and
step are named.

**How it is known.** The plain call, and gradients on three batches. Padding does not count, and neither does `-inf` in
an output, which is how logits are masked. Missing values that the model itself replaces are no finding.

**Limit.** None.

## Sick

```python
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(3, 8, batch_first=True)
        self.head = nn.Linear(8, 2)

    def forward(self, x):
        out, _ = self.lstm(torch.log(x))
        return self.head(out)

model = Model()
x = torch.randint(3, (4, 10, 3)).float()
```

## Healthy

```python
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(3, 8, batch_first=True)
        self.head = nn.Linear(8, 2)

    def forward(self, x):
        out, _ = self.lstm(torch.log1p(x))
        return self.head(out)

model = Model()
x = torch.randint(3, (4, 10, 3)).float()
```
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from ...cells import Call
from ...state import ends, spelled
from ..advice import CLIPPING, FILLING
from ..inputs import ModelInputs
from ..outcome import Outcome, steps_of_rows
from ..patient import Patient
from ..probes.calls import OutputLayout, PlainCall, TracedCall, by_rows
from ..probes.gradients import ParameterGradients
from ..rule import Rule, Symptom

_EDGE = "# keep away from the edge: (x + 1e-8).sqrt(), x.clamp(min=1e-8).log(); mask before the function, not after it"


def check(patient: Patient) -> Symptom | None:
    """NaN or Inf in a parameter, a state, an output or a gradient."""
    for name, parameter in patient.model.named_parameters():
        if not bool(parameter.detach().isfinite().all()):
            return _infinite(
                name,
                "the parameter",
                parameter,
                "it was never initialized (torch.empty), an update blew up, or a file was damaged",
                advice="model.apply(lambda m: m.reset_parameters() if hasattr(m, 'reset_parameters') else None), or "
                "torch.nn.init.normal_(parameter)  # then clip_grad_norm_ before optimizer.step()",
            )
    found = _infinite_values(patient[PlainCall]) or _infinite_output(patient) or _infinite_gradient(patient)
    return found or _infinite_batch(patient)


def _infinite_values(run: Outcome) -> Symptom | None:
    """Report NaN or Inf in what enters and leaves the layers in one call of the model."""
    for call in run.calls:
        found = _infinite_call(run.inputs, call)
        if found is not None:
            return found
    return None


def _infinite_call(inputs: ModelInputs, call: Call) -> Symptom | None:
    name = call.layer.label
    source, lengths = call.x, steps_of_rows(call)
    bad = _first_bad(source, lengths)
    if bad is not None and source.is_floating_point():
        row, step = bad
        given = [spelled(path) for path, end in ends(inputs.args) if _has_bad(end)]
        cause = (
            f"input{given[0]} holds it: missing values or a division by zero in the data"
            if given
            else "something before the layer makes it: a log or a division by zero, a square root of a negative number"
        )
        what = f"what enters the layer, at row {row}, step {step}"
        return _infinite(name, what, source, cause, advice=FILLING if given else _EDGE)
    output = call.output
    bad = _first_bad(output, lengths)
    if bad is not None:
        row, step = bad
        return _infinite(name, f"the state, first at row {row}, step {step}", output, "the state grew out of bounds")
    return None


def _has_bad(end: object) -> bool:
    end = end.data if isinstance(end, PackedSequence) else end
    return isinstance(end, Tensor) and end.is_floating_point() and not bool(end.isfinite().all())


def _first_bad(sequence: Tensor, lengths: Tensor) -> tuple[int, int] | None:
    if not sequence.is_floating_point() or bool(sequence.isfinite().all()):
        return None
    bad = (~sequence.detach().isfinite()).flatten(2).any(2).cpu()  # (batch, time)
    bad &= torch.arange(bad.shape[1]) < lengths.cpu().unsqueeze(1)
    places = bad.T.nonzero()
    return (int(places[0][1]), int(places[0][0])) if len(places) else None


def _infinite_output(patient: Patient) -> Symptom | None:
    for leaf in patient[OutputLayout].leaves:
        out = patient[PlainCall].outputs[leaf.path]
        if leaf.rows is not None and leaf.stepwise and patient.inputs.lengths is not None:
            rows = by_rows(out, leaf, patient.inputs.batch)
            out = rows[patient.inputs.valid[:, : rows.shape[1]].to(rows.device)]
        if bool(out.isnan().any()) or bool((out == float("inf")).any()):
            where, cause, advice = _made_by(patient)
            return _infinite(where or f"output{spelled(leaf.path)}", "the output", out, cause, advice=advice)
    return None


def _infinite_batch(patient: Patient) -> Symptom | None:
    """Report NaN or Inf in the states of a later batch of a data set."""
    if patient.survey is None or not patient.survey.first_bad:
        return None
    track, (batch, row, step) = min(patient.survey.first_bad.items(), key=lambda item: item[1][0])
    found = patient.survey.statistics[track]
    return Symptom(
        "error",
        track,
        f"the state, first in batch {batch} of the data set at row {row}, step {step}, holds {found.nan} NaN and "
        f"{found.inf} Inf in all {patient.survey.batches} batches (limit 0).",
        "that batch holds missing values or a division by zero, or the state grew out of bounds in it",
        FILLING,
        {"nan": found.nan, "inf": found.inf, "batch": batch, "limit": 0.0},
    )


def _made_by(patient: Patient) -> tuple[str, str, str]:
    """Return the line of the first operation that makes NaN or Inf of finite numbers, why it does, and the way out."""
    for operation in patient[TracedCall].trace:
        nan = any(map(_has_nan, operation.outputs))
        fresh = any(map(_has_bad, operation.outputs)) and not any(map(_has_bad, operation.inputs))
        if not nan and (not fresh or operation.name in _FILLS):
            continue  # -inf on purpose, before a softmax
        if nan and not fresh and operation.name != "softmax":
            continue
        if operation.name == "softmax":
            return (
                operation.line,
                "a softmax over a row that is masked throughout: all its scores are -inf",
                "scores.masked_fill(mask, -1e9), or torch.nan_to_num(weights) where a row has no real step",
            )
        if operation.name in ("exp", "__pow__", "pow", "exp_") and not nan:
            return operation.line, f"`{operation.name}` overflows", "torch.exp(x - x.max())  # or x.clamp(max=20).exp()"
        return (
            operation.line,
            f"`{operation.name}` makes it of finite numbers: a log, root or division at the edge",
            _EDGE,
        )
    return "", "the head makes it: a log of 0, or a division by 0", _EDGE


_FILLS = ("masked_fill", "masked_fill_", "full", "full_like", "where", "log", "new_full", "tensor")


def _has_nan(tensor: Tensor) -> bool:
    return tensor.is_floating_point() and bool(tensor.isnan().any())


def _infinite_gradient(patient: Patient) -> Symptom | None:
    if not any(p.requires_grad for p in patient.model.parameters()):
        return None
    try:
        found = patient[ParameterGradients]
    except Exception:  # reported where gradients are asked for
        return None
    if not found.infinite:
        return None
    return Symptom(
        "error",
        found.infinite[0],
        f"the gradient of {len(found.infinite)} parameters holds NaN or Inf, all outputs are finite (limit 0).",
        "a function without a finite slope: a square root, norm or log at 0, or torch.where around an infinite branch",
        _EDGE,
        {"parameters": len(found.infinite), "limit": 0.0},
    )


def _infinite(where: str, what: str, values: Tensor, cause: str, *, advice: str = CLIPPING) -> Symptom:
    nans, infs = int(values.isnan().sum()), int(values.isinf().sum())
    return Symptom(
        "error",
        where,
        f"{what} holds {nans} NaN and {infs} Inf among {values.numel()} values (limit 0).",
        cause,
        advice,
        {"nan": nans, "inf": infs, "limit": 0.0},
    )


RULE = Rule(
    "HS401",
    "NaN or Inf",
    check,
    probes=(OutputLayout, ParameterGradients, PlainCall, TracedCall),
    explains=(
        *("HS101", "HS102", "HS103", "HS104", "HS105", "HS106", "HS108", "HS110", "HS201", "HS202"),
        *("HS302", "HS304", "HS402", "HS403", "HS404", "HS405", "HS501", "HS502", "HS503"),
    ),
    check_whole=_infinite_values,
)
