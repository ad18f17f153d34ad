"""HS304: gate or state beyond its bound.

A gate leaves [0, 1], or a state leaves the bound that its cell implies: a state multiplied by more than one grows
without end.

**How it is known.** In a cell of your own that has other, squashed gates, or in a loop that a forward writes out, a
state is multiplied by the plain result of a linear map; or, driven by inputs of size 100 for 40 steps, the h of a cell
with gates and a tanh leaves [-1, 1]. What a cell names with `hs.tap` as a gate is checked too.

**Limit.** [0, 1] for gates, 1 for |h|. A small excess is a note.

## Sick

```python
class Cell(nn.Module):
    def __init__(self):
        super().__init__()
        self.input_size, self.hidden_size = 3, 8
        self.gates = nn.Linear(3 + 8, 4 * 8)

    def forward(self, x, state):
        h, c = state
        i, f, g, o = self.gates(torch.cat([x, h], 1)).chunk(4, 1)
        c = f * c + i.sigmoid() * g.tanh()            # no sigmoid on f
        h = o.sigmoid() * c.tanh()
        return h, c

model, inputs = Cell(), ()
```

## Healthy

```python
class Cell(nn.Module):
    def __init__(self):
        super().__init__()
        self.input_size, self.hidden_size = 3, 8
        self.gates = nn.Linear(3 + 8, 4 * 8)

    def forward(self, x, state):
        h, c = state
        i, f, g, o = self.gates(torch.cat([x, h], 1)).chunk(4, 1)
        c = f.sigmoid() * c + i.sigmoid() * g.tanh()
        h = o.sigmoid() * c.tanh()
        return h, c

model, inputs = Cell(), ()
```
"""

from __future__ import annotations

from itertools import pairwise

from torch import Tensor

from ...state import tensors
from ..outcome import SIGMOIDS, Makers, Operation, Operations
from ..patient import Patient
from ..probes.calls import TracedCall
from ..probes.cells import CellDrives, Drive
from ..probes.states import RecordedStates
from ..rule import Rule, Symptom

_LINEAR = {"linear", "add", "__add__", "__radd__", "matmul", "__matmul__", "addmm", "mm", "sub", "__sub__", "addmm_"}
_MAPS = {"linear", "matmul", "__matmul__", "addmm", "mm", "addmm_"}
_RECTIFIED = {"relu", "relu_", "softplus"}
_SUMS = {"add", "__add__", "__radd__", "add_", "__iadd__"}
_PRODUCTS = ("mul", "__mul__", "__rmul__", "multiply")
_OPEN = {"relu", "relu_", "softplus", "exp", "conv1d", "conv2d"}  # no bound above, or none at all


def check(patient: Patient) -> Symptom | None:
    """A gate outside [0, 1], or a state beyond the bound its cell implies."""
    for drive in patient[CellDrives]:
        raw = _raw_gate(drive)
        if raw is not None:
            operation, low, high = raw
            shifted = _shifted(drive)
            return Symptom(
                "warning",
                operation.line or drive.name,
                f"a state is multiplied by a gate that goes from {low:.2g} to {high:.2g} (limits 0 and 1), in "
                f"a cell with other gates that are squashed.",
                "a number is added to a gate that is squashed already, as in (1 + z) * h"
                if shifted
                else "this gate is not squashed to [0, 1]: its sigmoid is missing, or another function is in its place",
                "h = (1 - z) * h + z * n  # 1 - z, and not 1 + z" if shifted else "f = torch.sigmoid(self.forget(xh))",
                {"low": low, "high": high, "limit": 1.0},
            )
        beyond = _beyond(drive)
        if beyond is not None:
            return beyond
    return _in_a_loop(patient) or _recorded_gates(patient)


def _in_a_loop(patient: Patient) -> Symptom | None:
    """Report a loop in a forward whose state is multiplied, step by step, by a sum that nothing squashes."""
    inputs = patient.inputs
    found = _raw_gates(patient[TracedCall].trace)
    x, driven = inputs.get(inputs.main), ""
    if found and isinstance(x, Tensor) and x.is_floating_point():  # by larger inputs it is driven out of its bounds
        driven = " with inputs a hundred times as large"
        found = _raw_gates(patient.run(inputs.put(inputs.main, 100 * x), trace=True).trace)
    for line, gates in found.items():
        low, high = min(float(gate.min()) for gate in gates), max(float(gate.max()) for gate in gates)
        if low < -0.01 or high > 1.01:
            return Symptom(
                "warning",
                line,
                f"a state is multiplied by a gate that goes from {low:.2g} to {high:.2g}{driven} (limits 0 and 1), in "
                f"a loop with other gates that are squashed.",
                "this gate is not squashed to [0, 1]: its sigmoid is missing, or another function is in its place",
                "f = torch.sigmoid(self.forget(xh))",
                {"low": low, "high": high, "limit": 1.0},
            )
    return None


def _raw_gates(trace: Operations) -> dict[str, list[Tensor]]:
    """Return by line the sums that the states of a loop are multiplied by, where another gate is squashed."""
    made = trace.makers()
    lines: dict[str, list[tuple[Tensor, Tensor, Tensor]]] = {}  # gate, state and product of each step
    for operation in trace.named(*_PRODUCTS):
        if len(operation.inputs) == 2 and operation.line and operation.inputs[0].shape == operation.inputs[1].shape:
            for gate, state in (operation.inputs, operation.inputs[::-1]):
                if _plain_sum(made, gate) and isinstance(operation.output, Tensor):
                    lines.setdefault(operation.line, []).append((gate, state, operation.output))
    # Each product goes into a sum that is the next one's state, beside what another gate has let through.
    return {
        line: [gate for gate, _, _ in steps]
        for line, steps in lines.items()
        if len(steps) > 2 and all(_goes_on(made, *before, after=after[1]) for before, after in pairwise(steps))
    }


def _plain_sum(made: Makers, gate: Tensor) -> bool:
    """Whether a tensor is a linear map, or a sum of such maps, or what a function without a bound above makes of it."""
    maker = made.origin(gate)
    if maker is not None and maker.name in _RECTIFIED and maker.inputs:
        maker = made.origin(maker.inputs[0])
    if maker is None or maker.name not in _MAPS | _SUMS:
        return False
    return maker.name in _MAPS or any(
        inner is not None and inner.name in _MAPS for inner in map(made.origin, maker.inputs)
    )


def _goes_on(made: Makers, gate: Tensor, state: Tensor, product: Tensor, *, after: Tensor) -> bool:
    """Whether the state of the next step is the sum of a product and of something that a sigmoid takes part in."""
    total = made.origin(after)
    if total is None or total.name not in _SUMS or not any(t is product for t in total.inputs):
        return False
    waiting, seen = [t for t in total.inputs if t is not product], {id(state)}
    while waiting:
        tensor = waiting.pop()
        operation = None if id(tensor) in seen else made.get(id(tensor))
        seen.add(id(tensor))
        if operation is not None and operation.name in SIGMOIDS:
            return True
        waiting += [] if operation is None else operation.inputs
    return False


def _raw_gate(drive: Drive) -> tuple[Operation, float, float] | None:
    """Return a product of a state with a sum that nothing squashes, and the ends of its range."""
    for trace, state in [*zip(drive.traces, drive.states, strict=True), (drive.hard, drive.states[0])]:
        if not any(operation.name in SIGMOIDS for operation in trace):
            return None
        made = trace.makers()
        parts = {id(part) for part in state.values()}
        for operation in trace.named(*_PRODUCTS):
            if len(operation.inputs) != 2:
                continue
            a, b = operation.inputs
            for gate, value in ((a, b), (b, a)):
                maker = made.origin(gate)
                # A raw sum or linear map, on a state that was handed in as it is.
                if id(made.source(value)) not in parts or maker is None or maker.name not in _LINEAR | _OPEN:
                    continue
                low, high = float(gate.min()), float(gate.max())
                if (low < -0.01 or high > 1.01) and gate.shape[-1:] == value.shape[-1:]:
                    return operation, low, high
    return None


def _shifted(drive: Drive) -> bool:
    """Whether the gate that is out of bounds is a sigmoid with a number added."""
    for trace, state in zip(drive.traces, drive.states, strict=True):
        made, parts = trace.makers(), {id(part) for part in state.values()}
        for operation in trace.named(*_PRODUCTS):
            for gate in operation.inputs:
                maker = made.origin(gate)
                squashed = [made.origin(t) for t in maker.inputs] if maker is not None else []
                lone = len(squashed) == 1 and squashed[0] is not None and squashed[0].name in SIGMOIDS
                rest = [t for t in operation.inputs if t is not gate]
                if (
                    lone
                    and (gate.max() > 1.01 or gate.min() < -0.01)
                    and any(id(made.source(t)) in parts for t in rest)
                ):
                    return True
    return False


def _beyond(drive: Drive) -> Symptom | None:
    """Report a gated cell with a tanh whose h leaves [-1, 1] when driven hard."""
    names = {operation.name for trace in drive.traces for operation in trace}
    open_ended = {"relu", "leaky_relu", "elu", "gelu", "silu", "softplus", "exp", "layer_norm", "selu"}
    if not (names & SIGMOIDS) or not ({"tanh", "tanh_"} & names) or names & open_ended:
        return None
    bound = drive.bounds.get("h", 0.0)
    if bound <= 1.001 or _ends_linear(drive) or not _made_with_tanh(drive):
        return None
    return Symptom(
        "warning" if bound > 1.5 else "note",
        f"{drive.name} part h",
        f"driven by inputs of size 100 for 40 steps, |h| reached {bound:.3g} (limit 1 for gates and a tanh).",
        "the tanh on the cell state, or the (1 - gate) on the old state, is missing",
        "h = o * torch.tanh(c), or h = (1 - z) * h + z * n",
        {"bound": bound, "limit": 1.0},
    )


def _made_with_tanh(drive: Drive) -> bool:
    """Whether a tanh takes part in the next state, rather than in the output alone."""
    made = drive.traces[-1].makers()
    waiting = [drive.next_state]
    seen: set[int] = set()
    while waiting:
        operation = made.get(id(waiting.pop()))
        if operation is None or id(operation) in seen:
            continue
        seen.add(id(operation))
        if operation.name in ("tanh", "tanh_"):
            return True
        waiting.extend(operation.inputs)
    return False


def _ends_linear(drive: Drive) -> bool:
    """Whether h is the result of a linear map, a projection that has no bound."""
    made = drive.traces[-1].makers()
    firsts = list(tensors(drive.results[-1]).values())[:2]
    return any((maker := made.origin(t)) is not None and maker.name in ("linear", "matmul", "addmm") for t in firsts)


def _recorded_gates(patient: Patient) -> Symptom | None:
    """Report named intermediates of a cell (hs.tap) that call themselves gates, and are none."""
    for name, trajectory in patient[RecordedStates].items():
        for gate, values in trajectory.gates.items():
            squashed = gate in ("input", "forget", "output", "reset", "update") or gate.endswith("gate")
            if squashed and values.numel() and (float(values.min()) < -1e-3 or float(values.max()) > 1.001):
                low, high = float(values.min()), float(values.max())
                return Symptom(
                    "warning",
                    f"{name} gate {gate}",
                    f"its values go from {low:.2g} to {high:.2g} (limits 0 and 1).",
                    "the sigmoid on this gate is missing",
                    "f = torch.sigmoid(self.forget(xh))",
                    {"low": low, "high": high, "limit": 1.0},
                )
    return None


RULE = Rule("HS304", "gate or state beyond its bound", check, probes=(CellDrives, RecordedStates, TracedCall))
