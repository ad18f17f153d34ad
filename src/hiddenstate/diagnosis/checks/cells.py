"""Inside a user's own cell: one non-linearity at a time, and gates of their own."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from ..equal import same
from ..finding import Finding
from ..patient import Patient
from ..probes.cells import Drive, drives
from ..probes.repeats import traced
from ..tracing import REARRANGING, Event, Trace, Tracer

_TANH_OF_ONE = math.tanh(1.0)
SIGMOIDS = {"sigmoid", "sigmoid_", "hardsigmoid"}
_TWICE = {
    ("sigmoid", "sigmoid"),
    ("tanh", "tanh"),
    ("softmax", "softmax"),
    ("softmax", "log_softmax"),
    ("log_softmax", "softmax"),
    ("softmax", "cross_entropy"),
    ("sigmoid", "binary_cross_entropy_with_logits"),
}
PASSING = REARRANGING - {"cat", "stack"} | {"dropout"}


def one_nonlinearity(patient: Patient) -> Finding | None:
    """HS301: the same squashing function twice in a row."""
    traces = [traced(patient).trace, *(drive.traces[0] for drive in drives(patient) if drive.traces)]
    for trace in traces:
        found = _twice_in_a_row(trace)
        if found is not None:
            return found
    found = _in_the_loss(patient)
    if found is not None:
        return found
    for drive in drives(patient):
        # An h beside a c that is bounded itself may well end at tanh(1).
        for part, bound in drive.bounds.items() if len(drive.bounds) == 1 else ():
            if _TANH_OF_ONE - 2e-3 < bound <= _TANH_OF_ONE + 1e-5:
                return _double(
                    f"{drive.name} part {part}",
                    f"driven by inputs of size 100, |{part}| stays below {bound:.4f}, which is tanh(1) = "
                    f"{_TANH_OF_ONE:.4f} "
                    f"(needed: up to 1).",
                    "tanh",
                )
    return None


def _twice_in_a_row(trace: Trace, first_index: int = 0) -> Finding | None:
    made = {id(out): event for event in trace.events for out in outs(event)}
    for event in trace.events[first_index:]:
        outer = event.name.rstrip("_") if event.name != "log_softmax" else event.name
        if not event.inputs or not any(outer == pair[1] for pair in _TWICE):
            continue
        inner = origin(made, event.inputs[0])
        if inner is None or (inner.name.rstrip("_"), outer) not in _TWICE:
            continue
        if outer == "softmax" and (inner.kwargs.get("dim") or inner.args[1:2]) != (
            event.kwargs.get("dim") or event.args[1:2]
        ):
            continue  # over two axes, as routing and matching do
        bound = {"tanh": "|value| ≤ 0.7616", "sigmoid": "0.5 ≤ value ≤ 0.7311"}.get(outer, "nearly uniform values")
        return _double(
            event.line or outer,
            f"`{outer}` is applied to the result of `{inner.name}`{f' ({inner.line})' if inner.line else ''}: {bound} "
            f"(needed: 1 non-linearity, found 2).",
            outer,
        )
    return None


def outs(event: Event) -> list[Tensor]:
    """Return the tensors that an operation gave."""
    items = event.output if isinstance(event.output, tuple | list) else [event.output]
    return [t for t in items if isinstance(t, Tensor)]


def source(made: dict[int, Event], tensor: Tensor) -> Tensor:
    """Return the tensor whose values these are, looking through operations that only rearrange."""
    for _ in range(12):
        event = made.get(id(tensor))
        if event is None or event.name not in PASSING or not event.inputs:
            break
        tensor = event.inputs[0]
    return tensor


def origin(made: dict[int, Event], tensor: Tensor) -> Event | None:
    """Return the operation that made a tensor's values."""
    return made.get(id(source(made, tensor)))


def _in_the_loss(patient: Patient) -> Finding | None:
    if patient.loss is None:
        return None
    with patient.afresh(), torch.no_grad():
        run = patient.call(patient.whole, trace=True)
        with Tracer() as tracer:
            patient.loss(run.result, patient.targets)
    joined = Trace([*run.trace.events, *tracer.trace.events])
    return _twice_in_a_row(joined, len(run.trace.events))


def _double(where: str, evidence: str, name: str) -> Finding:
    advice = {
        "cross_entropy": "return the logits: nn.CrossEntropyLoss applies log_softmax itself",
        "binary_cross_entropy_with_logits": "return the logits, or use nn.BCELoss with the sigmoid",
    }.get(name, f"apply it once: h = torch.{name}(self.input(x) + self.recurrent(h))")
    return Finding(
        "HS301",
        "warning",
        where,
        evidence,
        "a result that was squashed already is squashed again, which flattens it and its gradient",
        advice,
        {"times": 2},
    )


def gates_differ(patient: Patient) -> Finding | None:
    """HS303: two gates that are always the same."""
    for drive in drives(patient):
        found = _identical(drive)
        if found:
            return _twins(drive.name, *found)
    for layer in patient.layers:
        module = layer.module
        if isinstance(module, nn.RNNBase | nn.RNNCellBase):
            pair = _identical_blocks(module)
            if pair:
                return _twins(layer.label, *pair)
    return None


def _identical(drive: Drive) -> tuple[str, str] | None:
    """Return two squashed values that are equal in every traced step and come from different places."""
    steps = [[e for e in trace.events if e.name in SIGMOIDS and isinstance(e.output, Tensor)] for trace in drive.traces]
    if not steps or len({len(step) for step in steps}) != 1:
        return None
    for a in range(len(steps[0])):
        for b in range(a + 1, len(steps[0])):
            if all(_twin_events(step[a], step[b], trace) for step, trace in zip(steps, drive.traces, strict=True)):
                return steps[0][a].line, steps[0][b].line
    return None


def _twin_events(a: Event, b: Event, trace: Trace) -> bool:
    if a.output.shape != b.output.shape or not same(a.output, b.output) or a.output.numel() < 2:
        return False
    if a.inputs[0] is b.inputs[0]:
        return False  # one gate, written down twice on purpose
    # A gate and one minus the same gate are a pair, however often it is computed.
    return not (_only_subtracted(a.output, trace) or _only_subtracted(b.output, trace))


def _only_subtracted(gate: Tensor, trace: Trace) -> bool:
    uses = {event.name for event in trace.events if any(tensor is gate for tensor in event.inputs)}
    return bool(uses) and uses <= {"rsub", "__rsub__", "sub", "__sub__"}


def _identical_blocks(module: nn.Module) -> tuple[str, str] | None:
    gates = {"LSTM": 4, "LSTMCell": 4, "GRU": 3, "GRUCell": 3}.get(type(module).__name__)
    names = {4: ("input", "forget", "candidate", "output"), 3: ("reset", "update", "candidate")}.get(gates or 0)
    if gates is None or names is None:
        return None
    weights = [p.detach() for n, p in module.named_parameters() if n.endswith(("_l0", "ih", "hh")) and "weight" in n]
    biases = [p.detach() for n, p in module.named_parameters() if n.endswith(("_l0", "ih", "hh")) and "bias" in n]
    squashed = [k for k, name in enumerate(names) if name != "candidate"]
    for i in squashed:
        for j in squashed:
            if i < j and all(same(p.chunk(gates)[i], p.chunk(gates)[j]) for p in (*weights, *biases)):
                return f"gate {names[i]!r}", f"gate {names[j]!r}"
    return None


def _twins(where: str, first: str, second: str) -> Finding:
    return Finding(
        "HS303",
        "warning",
        where,
        f"{first or 'one gate'} and {second or 'another'} gave the same values, to the last bit, at every step "
        "tried (limit: 0 pairs).",
        "one gate's weights are used for both, or both were initialized alike with constants",
        "one linear map for each gate, or one for all: i, f, g, o = self.gates(xh).chunk(4, dim=-1)",
        {"pairs": 1},
    )
