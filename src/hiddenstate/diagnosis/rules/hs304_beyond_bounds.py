"""HS304: gate or state beyond its bound.

A gate leaves [0, 1], or a state leaves the bound that its cell implies: a state multiplied by more than one grows
without end.

**How it is known.** In a cell of your own that has other, squashed gates, or in a loop that a forward writes out, a
state is multiplied by the plain result of a linear map; or, driven by inputs of size 100 for 40 steps, the h of a cell
with gates and a tanh leaves [-1, 1]. In a loop, all that a state is multiplied by on its straight way to the next step
is read from a trace: a leak above 1, a gate with a number added to it, one of a tanh among others of a sigmoid, and one
that nothing squashes, which inputs a hundred times as large drive out of its bounds. What a cell names with `hs.tap`
as a gate is checked too.

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

from ...state import tensors
from ..outcome import SIGMOIDS, Operation
from ..patient import Patient
from ..probes.calls import TracedCall
from ..probes.cells import CellDrives, Drive
from ..probes.factors import StateFactors
from ..probes.states import RecordedStates
from ..rule import Rule, Symptom

_LINEAR = {"linear", "add", "__add__", "__radd__", "matmul", "__matmul__", "addmm", "mm", "sub", "__sub__", "addmm_"}
_UNBOUNDED = {"linear", "matmul", "__matmul__", "addmm", "mm", "bmm", "conv2d", "relu", "relu_", "softplus"}
_PRODUCTS = ("mul", "__mul__", "__rmul__", "multiply")
_OPEN = {"relu", "relu_", "softplus", "exp", "conv1d", "conv2d"}  # no bound above, or none at all


def check(patient: Patient) -> Symptom | None:
    """A gate outside [0, 1], or a state beyond the bound its cell implies."""
    for drive in patient[CellDrives]:
        raw = _raw_gate(drive)
        if raw is not None:
            operation, low, high = raw
            return _leaving(
                operation.line or drive.name, low, high, "in a cell with other gates that are squashed", _shifted(drive)
            )
        beyond = _beyond(drive)
        if beyond is not None:
            return beyond
    return _in_a_loop(patient) or _recorded_gates(patient)


def _in_a_loop(patient: Patient) -> Symptom | None:
    """Report a loop whose state is multiplied, step by step, by what leaves [0, 1]."""
    squashed = bool(patient[TracedCall].trace.named(*SIGMOIDS))
    for factor in patient[StateFactors]:
        low, high = factor.low, factor.high
        grows = high > 1.01 or low < -1.01
        if not factor.varies:
            if grows:
                return _growing(factor.line, low if low < -1.01 else high)
            continue
        raw, shifted = bool(factor.made_by & _UNBOUNDED), "sigmoid" in factor.made_by and grows
        in_place = raw and (squashed or factor.complement)  # among other gates, or paired with its complement
        flipped = low < -0.01 and factor.made_by == {"tanh"} and squashed
        if "exp" not in factor.made_by and ((in_place and (grows or low < -0.01)) or shifted or flipped):
            return _leaving(factor.line, low, high, "with inputs of this size or a hundred times as large", shifted)
    return None


def _growing(line: str, factor: float) -> Symptom:
    return Symptom(
        "warning",
        line,
        f"the state is multiplied by {factor:.3g} at each step (limits -1 and 1), and nothing "
        "squashes what comes of it.",
        "a factor above 1 on the old state lets it grow without end: a leak or decay is a share, below 1",
        "h = decay * h + (1 - decay) * new  # with a decay below 1: torch.sigmoid(self.decay), or exp(-dt / tau)",
        {"low": factor, "high": factor, "limit": 1.0},
    )


def _leaving(line: str, low: float, high: float, seen: str, shifted: bool) -> Symptom:
    return Symptom(
        "error",
        line,
        f"a state is multiplied by a gate that goes from {low:.2g} to {high:.2g} (limits 0 and 1), {seen}.",
        "a number is added to a gate that is squashed already, as in (1 + z) * h"
        if shifted
        else "this gate is not squashed to [0, 1]: its sigmoid is missing, or another function is in its place",
        "h = (1 - z) * h + z * n  # 1 - z, and not 1 + z" if shifted else "f = torch.sigmoid(self.forget(xh))",
        {"low": low, "high": high, "limit": 1.0},
    )


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


RULE = Rule(
    "HS304", "gate or state beyond its bound", check, probes=(CellDrives, StateFactors, RecordedStates, TracedCall)
)
