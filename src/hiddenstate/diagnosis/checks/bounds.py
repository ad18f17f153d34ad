"""HS304: gates stay in [0, 1], and states within the bound that their cell implies."""

from __future__ import annotations

from typing import Any

from ...state import tensors
from ..finding import Finding
from ..patient import Patient
from ..probes.cells import Drive, drives
from ..probes.states import recorded
from ..tracing import Event
from .cells import SIGMOIDS, origin, outs, source


def within_bounds(patient: Patient) -> Finding | None:
    """HS304: a gate outside [0, 1], or a state beyond the bound its cell implies."""
    for drive in drives(patient):
        raw = _raw_gate(drive)
        if raw is not None:
            event, low, high = raw
            return Finding(
                "HS304",
                "warning",
                event.line or drive.name,
                f"a state is multiplied by a gate that goes from {low:.2g} to {high:.2g} (limits 0 and 1), in "
                "a cell with "
                f"other gates that are squashed.",
                "the sigmoid on this gate is missing",
                "f = torch.sigmoid(self.forget(xh))",
                {"low": low, "high": high, "limit": 1.0},
            )
        beyond = _beyond(drive)
        if beyond is not None:
            return beyond
    return _recorded_gates(patient)


def _raw_gate(drive: Drive) -> tuple[Event, float, float] | None:
    for trace, state in zip(drive.traces, drive.states, strict=True):
        if not any(event.name in SIGMOIDS for event in trace.events):
            return None
        made = {id(out): event for event in trace.events for out in outs(event)}
        parts = {id(part) for part in state.values()}
        for event in trace.named("mul", "__mul__", "__rmul__", "multiply"):
            if len(event.inputs) != 2:
                continue
            a, b = event.inputs
            for gate, value in ((a, b), (b, a)):
                maker = origin(made, gate)
                # A raw sum or linear map, on a state that was handed in as it is.
                if id(source(made, value)) not in parts or maker is None or maker.name not in _LINEAR:
                    continue
                low, high = float(gate.min()), float(gate.max())
                if (low < -0.01 or high > 1.01) and gate.shape[-1:] == value.shape[-1:]:
                    return event, low, high
    return None


_LINEAR = {"linear", "add", "__add__", "__radd__", "matmul", "__matmul__", "addmm", "mm", "sub", "__sub__", "addmm_"}


def _beyond(drive: Drive) -> Finding | None:
    """A gated cell with a tanh whose h leaves [-1, 1] when driven hard."""
    names = {event.name for trace in drive.traces for event in trace.events}
    open_ended = {"relu", "leaky_relu", "elu", "gelu", "silu", "softplus", "exp", "layer_norm", "selu"}
    if not (names & SIGMOIDS) or not ({"tanh", "tanh_"} & names) or names & open_ended:
        return None
    bound = drive.bounds.get("h", 0.0)
    if bound <= 1.001 or _ends_linear(drive) or not _made_with_tanh(drive):
        return None
    return Finding(
        "HS304",
        "warning" if bound > 1.5 else "note",
        f"{drive.name} part h",
        f"driven by inputs of size 100 for 40 steps, |h| reached {bound:.3g} (limit 1 for gates and a tanh).",
        "the tanh on the cell state, or the (1 - gate) on the old state, is missing",
        "h = o * torch.tanh(c), or h = (1 - z) * h + z * n",
        {"bound": bound, "limit": 1.0},
    )


def _made_with_tanh(drive: Drive) -> bool:
    """Whether a tanh takes part in the next state, rather than in the output alone."""
    made = {id(out): event for event in drive.traces[-1].events for out in outs(event)}
    waiting = [drive.next_state]
    seen: set[int] = set()
    while waiting:
        event = made.get(id(waiting.pop()))
        if event is None or id(event) in seen:
            continue
        seen.add(id(event))
        if event.name in ("tanh", "tanh_"):
            return True
        waiting.extend(event.inputs)
    return False


def _ends_linear(drive: Drive) -> bool:
    """Whether h is the result of a linear map, a projection that has no bound."""
    trace, result = drive.traces[-1], drive.results[-1]
    made = {id(out): event for event in trace.events for out in outs(event)}
    firsts: list[Any] = list(tensors(result).values())[:2]
    return any((maker := origin(made, t)) is not None and maker.name in ("linear", "matmul", "addmm") for t in firsts)


def _recorded_gates(patient: Patient) -> Finding | None:
    """Named intermediates of a cell (hs.tap) that call themselves gates."""
    for name, trajectory in recorded(patient).items():
        for gate, values in trajectory.gates.items():
            squashed = gate in ("input", "forget", "output", "reset", "update") or gate.endswith("gate")
            if squashed and values.numel() and (float(values.min()) < -1e-3 or float(values.max()) > 1.001):
                low, high = float(values.min()), float(values.max())
                return Finding(
                    "HS304",
                    "warning",
                    f"{name} gate {gate}",
                    f"its values go from {low:.2g} to {high:.2g} (limits 0 and 1).",
                    "the sigmoid on this gate is missing",
                    "f = torch.sigmoid(self.forget(xh))",
                    {"low": low, "high": high, "limit": 1.0},
                )
    return None
