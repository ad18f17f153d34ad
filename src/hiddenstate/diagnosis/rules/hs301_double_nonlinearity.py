"""HS301: double non-linearity.

The same squashing function is applied twice: a tanh of a tanh never leaves ±0.7616, a sigmoid of a sigmoid stays in
[0.5, 0.7311], and gradients shrink with them. A softmax before `CrossEntropyLoss`, or a sigmoid before
`BCEWithLogitsLoss`, is the same mistake.

**How it is known.** Every operation of one call is written down, that of `loss=` among them; a squashing function whose
input was made by the same function, with nothing but rearranging in between, is told. A cell of your own is driven by
inputs of size 100 as well: a state that ends at tanh(1) is told.

**Limit.** 2 in a row.

## Sick

```python
class Cell(nn.Module):
    def __init__(self):
        super().__init__()
        self.input_size, self.hidden_size = 3, 8
        self.i2h, self.h2h = nn.Linear(3, 8), nn.Linear(8, 8)

    def forward(self, x, h):
        h = torch.tanh(self.i2h(x) + self.h2h(h))
        return torch.tanh(h)

model, inputs = Cell(), ()
```

## Healthy

```python
class Cell(nn.Module):
    def __init__(self):
        super().__init__()
        self.input_size, self.hidden_size = 3, 8
        self.i2h, self.h2h = nn.Linear(3, 8), nn.Linear(8, 8)

    def forward(self, x, h):
        return torch.tanh(self.i2h(x) + self.h2h(h))

model, inputs = Cell(), ()
```
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from ..outcome import PASSING, Operation, Operations, Tracer
from ..patient import Patient
from ..probes.calls import TracedCall
from ..probes.cells import CellDrives
from ..rule import Rule, Symptom

_TANH_OF_ONE = math.tanh(1.0)


_TWICE = {
    ("sigmoid", "sigmoid"),
    ("tanh", "tanh"),
    ("softmax", "softmax"),
    ("softmax", "log_softmax"),
    ("log_softmax", "softmax"),
    ("softmax", "cross_entropy"),
    ("sigmoid", "binary_cross_entropy_with_logits"),
    ("tanh", "relu"),
    ("tanh", "sigmoid"),
}
_OF_TANH = {  # what is left of the values of a tanh
    "relu": ("0 ≤ value ≤ 1, and no gradient for half of all values", "one of them: torch.tanh keeps the sign"),
    "sigmoid": ("0.27 ≤ value ≤ 0.73", "torch.sigmoid alone for a gate or a probability, torch.tanh alone for a state"),
}


def check(patient: Patient) -> Symptom | None:
    """The same squashing function twice in a row."""
    traces = [patient[TracedCall].trace, *(drive.traces[0] for drive in patient[CellDrives] if drive.traces)]
    for trace in traces:
        found = _twice_in_a_row(trace)
        if found is not None:
            return found
    found = _in_the_loss(patient) or _after_a_layer(patient)
    if found is not None:
        return found
    for drive in patient[CellDrives]:
        # An h beside a c that is bounded itself may well end at tanh(1).
        for part, bound in drive.bounds.items() if len(drive.bounds) == 1 else ():
            if _TANH_OF_ONE - 2e-3 < bound <= _TANH_OF_ONE + 1e-5:
                return _double(
                    f"{drive.name} part {part}",
                    f"driven by inputs of size 100, |{part}| stays below {bound:.4f}, which is "
                    f"tanh(1) = {_TANH_OF_ONE:.4f} (needed: up to 1).",
                    "tanh",
                )
    return None


def _twice_in_a_row(trace: Operations, first_index: int = 0) -> Symptom | None:
    """Report the first operation, from an index on, that squashes the result of one of its kind."""
    made = trace.makers()
    for operation in trace[first_index:]:
        outer = operation.name.rstrip("_") if operation.name != "log_softmax" else operation.name
        if not operation.inputs or not any(outer == pair[1] for pair in _TWICE):
            continue
        inner = made.origin(operation.inputs[0])
        if inner is None or (inner.name.rstrip("_"), outer) not in _TWICE:
            continue
        if outer == "softmax" and (inner.kwargs.get("dim") or inner.args[1:2]) != (
            operation.kwargs.get("dim") or operation.args[1:2]
        ):
            continue  # over two axes, as routing and matching do
        if inner.name.rstrip("_") == "tanh" and outer in _OF_TANH:
            return _of_tanh(operation, f"the result of `tanh`{f' ({inner.line})' if inner.line else ''}", outer)
        bound = {"tanh": "|value| ≤ 0.7616", "sigmoid": "0.5 ≤ value ≤ 0.7311"}.get(outer, "nearly uniform values")
        where = inner.line if first_index and inner.line else operation.line or outer  # of a loss: in the model
        return _double(
            where,
            f"`{outer}` is applied to the result of `{inner.name}`{f' ({inner.line})' if inner.line else ''}: {bound} "
            f"(needed: 1 non-linearity, found 2).",
            outer,
        )
    return None


def _of_tanh(operation: Operation, what: str, outer: str) -> Symptom:
    """Note a second non-linearity of another kind, which leaves a part of the range of a tanh."""
    left, way_out = _OF_TANH[outer]
    return Symptom(
        "note",
        operation.line or outer,
        f"`{outer}` is applied to {what}: {left} (needed: 1 non-linearity, found 2).",
        "a result that was squashed already goes through a second non-linearity",
        f"# {way_out}",
        {"times": 2},
    )


def _after_a_layer(patient: Patient) -> Symptom | None:
    """Report a tanh of what a layer of torch's returns, which lies within ±1 already."""
    run = patient[TracedCall]
    made = run.trace.makers()
    outputs = {id(call.output_native): call for call in run.calls if isinstance(call.output_native, Tensor)}
    users: dict[int, set[str]] = {}
    for operation in run.trace:
        for source in {id(made.source(tensor)) for tensor in operation.inputs} & outputs.keys():
            users.setdefault(source, set()).add(operation.name)
    for operation in run.trace.named("tanh", "tanh_", "relu", "relu_", "sigmoid", "sigmoid_"):
        call = outputs.get(id(made.source(operation.inputs[0])))
        module = None if call is None else call.layer.module
        if (
            not isinstance(module, nn.RNN | nn.LSTM | nn.GRU | nn.RNNCell)
            or getattr(module, "nonlinearity", "") == "relu"
        ):
            continue
        # Scores of attention are taken of a tanh, beside the states themselves.
        name = operation.name.rstrip("_")
        if name in _OF_TANH:
            return _of_tanh(operation, f"the output of an nn.{type(module).__name__}, which is within ±1", name)
        others = users[id(made.source(operation.inputs[0]))] - PASSING - {"tanh", "tanh_"}
        twice = isinstance(module, nn.RNN | nn.RNNCell) and not others
        kind = type(module).__name__
        return Symptom(
            "warning" if twice else "note",
            operation.line or "tanh",
            f"`tanh` is applied to the output of an nn.{kind}, which is {'a tanh' if twice else 'within ±1'} already: "
            f"|value| ≤ 0.7616 (needed: 1 non-linearity, found 2).",
            "a result that was squashed already is squashed again, which flattens it and its gradient",
            "out, _ = self.rnn(x); return self.head(out)  # without torch.tanh",
            {"times": 2},
        )
    return None


def _in_the_loss(patient: Patient) -> Symptom | None:
    """Report a loss that squashes what the model has squashed already."""
    if patient.loss is None:
        return None
    with patient.afresh(), torch.no_grad():
        run = patient.call(patient.whole, trace=True)
        with Tracer() as tracer:
            patient.loss(run.result, patient.targets)
    joined = Operations([*run.trace, *tracer.trace])
    return _twice_in_a_row(joined, len(run.trace))


def _double(where: str, evidence: str, name: str) -> Symptom:
    advice = {
        "cross_entropy": "return the logits: nn.CrossEntropyLoss applies log_softmax itself",
        "binary_cross_entropy_with_logits": "return the logits, or use nn.BCELoss with the sigmoid",
        "softmax": "leave one of the two softmax out: weights = torch.softmax(scores, dim=1), of scores as they are",
        "log_softmax": "return the logits as they are, and apply log_softmax once",
    }.get(name, f"leave one of the two torch.{name} out: h = torch.{name}(...), of a sum as it is")
    return Symptom(
        "warning",
        where,
        evidence,
        "a result that was squashed already is squashed again, which flattens it and its gradient",
        advice,
        {"times": 2},
    )


RULE = Rule("HS301", "double non-linearity", check, probes=(CellDrives, TracedCall))
