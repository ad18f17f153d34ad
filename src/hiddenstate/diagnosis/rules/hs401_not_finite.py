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
from ..inputs import ModelInputs
from ..outcome import Outcome, steps_of_rows
from ..patient import Patient
from ..probes.calls import PlainCall
from ..probes.layout import OutputLayout, by_rows
from ..probes.parameters import ParameterGradients
from ..rule import Rule, Symptom


def check(patient: Patient) -> Symptom | None:
    """NaN or Inf in a parameter, a state, an output or a gradient."""
    for name, parameter in patient.model.named_parameters():
        if not bool(parameter.detach().isfinite().all()):
            return _infinite(name, "the parameter", parameter, "an update blew up, or a file was damaged")
    return _infinite_values(patient[PlainCall]) or _infinite_output(patient) or _infinite_gradient(patient)


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
        return _infinite(name, f"what enters the layer, at row {row}, step {step}", source, cause)
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
            return _infinite(
                f"output{spelled(leaf.path)}", "the output", out, "the head makes it: a log of 0, or a division by 0"
            )
    return None


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
        "keep away from the edge: (x + 1e-8).sqrt(), and mask before the function, not after it",
        {"parameters": len(found.infinite), "limit": 0.0},
    )


def _infinite(where: str, what: str, values: Tensor, cause: str) -> Symptom:
    nans, infs = int(values.isnan().sum()), int(values.isinf().sum())
    return Symptom(
        "error",
        where,
        f"{what}, holds {nans} NaN and {infs} Inf among {values.numel()} values (limit 0).",
        cause,
        "torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0) before optimizer.step(), a smaller learning rate, "
        "x = torch.nan_to_num(x) for missing values",
        {"nan": nans, "inf": infs, "limit": 0.0},
    )


RULE = Rule(
    "HS401",
    "NaN or Inf",
    check,
    probes=(OutputLayout, ParameterGradients, PlainCall),
    explains=(
        *("HS101", "HS102", "HS103", "HS104", "HS105", "HS106", "HS108", "HS110", "HS201", "HS202"),
        *("HS302", "HS304", "HS402", "HS403", "HS404", "HS405", "HS501", "HS502", "HS503"),
    ),
    check_whole=_infinite_values,
)
