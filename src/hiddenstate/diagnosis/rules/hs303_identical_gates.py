"""HS303: two gates always identical.

Two gates have the same value at every step, to the last bit: one of them is a copy, by mistake or by initialization.

**How it is known.** The sigmoids of a cell of your own are compared in three steps with random states; one that is only
used as `1 - gate` is its partner and no copy. Of torch's layers, the weights of the gates are compared.

**Limit.** No pair.

## Sick

```python
class Cell(nn.Module):
    def __init__(self):
        super().__init__()
        self.input_size, self.hidden_size = 3, 8
        self.z, self.n = nn.Linear(11, 8), nn.Linear(11, 8)

    def forward(self, x, h):
        xh = torch.cat([x, h], 1)
        z = torch.sigmoid(self.z(xh))
        r = torch.sigmoid(self.z(xh))                 # z again
        n = torch.tanh(self.n(torch.cat([x, r * h], 1)))
        return (1 - z) * n + z * h

model, inputs = Cell(), ()
```

## Healthy

```python
class Cell(nn.Module):
    def __init__(self):
        super().__init__()
        self.input_size, self.hidden_size = 3, 8
        self.z, self.r, self.n = nn.Linear(11, 8), nn.Linear(11, 8), nn.Linear(11, 8)

    def forward(self, x, h):
        xh = torch.cat([x, h], 1)
        z = torch.sigmoid(self.z(xh))
        r = torch.sigmoid(self.r(xh))
        n = torch.tanh(self.n(torch.cat([x, r * h], 1)))
        return (1 - z) * n + z * h

model, inputs = Cell(), ()
```
"""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor, nn

from ..advice import drawn_anew
from ..outcome import SIGMOIDS, Operation, Operations, same
from ..patient import Patient
from ..probes.calls import TracedCall
from ..probes.cells import CellDrives
from ..rule import Rule, Symptom


def check(patient: Patient) -> Symptom | None:
    """Two gates that are always the same."""
    for drive in patient[CellDrives]:
        found = _identical([_gates(trace) for trace in drive.traces], drive.traces)
        if found:
            return _twins(drive.name, *found)
    if patient.seen and not patient[CellDrives]:  # a loop that is written out: as many gates at each of its steps
        trace, steps = patient[TracedCall].trace, patient.inputs.steps
        gates, each = _gates(trace), len(_gates(trace)) // max(1, steps)
        if steps > 2 and each > 1 and len(gates) == each * steps:
            found = _identical([gates[k * each : (k + 1) * each] for k in range(steps)], [trace] * steps)
            if found:
                return _twins(patient.seen[0].label, *found)
    for layer in patient.layers:
        module = layer.module
        if isinstance(module, nn.RNNBase | nn.RNNCellBase):
            pair = _identical_blocks(module)
            if pair:
                return replace(
                    _twins(layer.label, *pair),
                    evidence=f"{pair[0]} and {pair[1]} have the same weights, to the last bit (limit: 0 pairs).",
                    cause="the weights of both gates were initialized alike, with a constant",
                    advice=f"{drawn_anew(layer)}  # weights that differ, as torch draws them",
                )
    return None


def _gates(trace: Operations) -> list[Operation]:
    return [o for o in trace if o.name in SIGMOIDS and isinstance(o.output, Tensor)]


def _identical(steps: list[list[Operation]], traces: list[Operations]) -> tuple[str, str] | None:
    """Return two squashed values that are equal in every traced step and come from different places."""
    if not steps or len({len(step) for step in steps}) != 1:
        return None
    for a in range(len(steps[0])):
        for b in range(a + 1, len(steps[0])):
            if all(_twin_operations(step[a], step[b], trace) for step, trace in zip(steps, traces, strict=True)):
                return steps[0][a].line, steps[0][b].line
    return None


def _twin_operations(a: Operation, b: Operation, trace: Operations) -> bool:
    if a.output.shape != b.output.shape or not same(a.output, b.output) or a.output.numel() < 2:
        return False
    if a.inputs[0] is b.inputs[0]:
        return False  # one gate, written down twice on purpose
    # A gate and one minus the same gate are a pair, however often it is computed.
    return not (_only_subtracted(a.output, trace) or _only_subtracted(b.output, trace))


def _only_subtracted(gate: Tensor, trace: Operations) -> bool:
    uses = trace.users(gate)
    return bool(uses) and uses <= {"rsub", "__rsub__", "sub", "__sub__"}


def _identical_blocks(module: nn.Module) -> tuple[str, str] | None:
    """Return two gates of one of torch's layers that have the same weights."""
    gates = {"LSTM": 4, "LSTMCell": 4, "GRU": 3, "GRUCell": 3}.get(type(module).__name__)
    names = {4: ("input", "forget", "candidate", "output"), 3: ("reset", "update", "candidate")}.get(gates or 0)
    if gates is None or names is None:
        return None
    weights = [p.detach() for n, p in module.named_parameters() if n.endswith(("_l0", "ih", "hh")) and "weight" in n]
    biases = [p.detach() for n, p in module.named_parameters() if n.endswith(("_l0", "ih", "hh")) and "bias" in n]
    if len(weights) < 2:
        return None  # they are kept elsewhere, as by a parametrization: biases alone say nothing
    squashed = [k for k, name in enumerate(names) if name != "candidate"]
    for i in squashed:
        for j in squashed:
            if i < j and all(same(p.chunk(gates)[i], p.chunk(gates)[j]) for p in (*weights, *biases)):
                return f"gate {names[i]!r}", f"gate {names[j]!r}"
    return None


def _twins(where: str, first: str, second: str) -> Symptom:
    return Symptom(
        "warning",
        where,
        f"{first or 'one gate'} and {second or 'another'} gave the same values, to the last bit, at every step "
        "tried (limit: 0 pairs).",
        "one gate's weights are used for both, or the weights of both were initialized alike, with a constant",
        "one linear map for each gate, or one for all: i, f, g, o = self.gates(xh).chunk(4, dim=-1)",
        {"pairs": 1},
    )


RULE = Rule("HS303", "two gates always identical", check, probes=(CellDrives, TracedCall), explains=("HS302", "HS503"))
