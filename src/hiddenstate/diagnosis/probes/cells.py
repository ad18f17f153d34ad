"""Probe: a single step of a cell with other states and inputs, and the steps a model makes with it."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from ...cells import Call, Layer, unheard
from ...state import State, tensors
from ..inputs import another_state, spread
from ..outcome import SIGMOIDS, Operations, Tracer, same
from ..patient import Patient, PatientProbe
from .calls import PlainCall
from .gradients import Backward, projected


@dataclass(frozen=True, slots=True, eq=False)
class Trial:
    """How one step of a user's own cell answers to what it is given."""

    name: str
    layer: Layer
    call: Call
    by_input: float | None  # how far another input moves what it returns, relative to its size
    by_part: dict[str, float]  # the same for each part of the state
    cut: str  # "" or what shows that no gradient reaches the state
    kept: str = ""  # a part that a gate is applied to, and that comes out as it went in


class CellTrials(tuple[Trial, ...], PatientProbe):
    """One step of every cell that the user wrote, tried with other inputs and other states."""

    @classmethod
    def measure(cls, patient: Patient) -> CellTrials:
        """Take for each cell a call in the middle of the sequence, where it is given a state."""
        found = []
        for layer in patient.layers:
            if layer.fused or layer.kind != "cell":
                continue
            calls = patient[PlainCall].calls.of(layer)
            usable = [call for call in calls if call.given is not None] or calls
            if usable:
                found.append(_trial(patient, layer, usable[len(usable) // 2]))
        return cls(found)


def _step(call: Call, state: State, x: Any = None) -> Any:
    """Call a cell once more as it was called, with another state or input."""
    call = call.handed(state) if x is None else call.handed(state).fed(x)
    with unheard():
        return call.layer.module(*call.args, **call.kwargs)


def _first_state(call: Call) -> State:
    """Return the state a call was given, or the one it would start from, unlike zeros in either case."""
    state = call.given if call.given is not None else call.layer.initial(call.rows)
    return state.detach().map(lambda part: another_state(part, 21) if part.is_floating_point() else part)


def _input(call: Call) -> Tensor:
    x = call.input
    assert isinstance(x, Tensor)  # one step, which nobody packs
    return x.detach()


def _trial(patient: Patient, layer: Layer, call: Call) -> Trial:
    with patient.afresh(), torch.no_grad():
        patient.model.eval()
        state = _first_state(call)
        old = _step(call, state)
        x = _input(call)
        by_input = _moved(old, _step(call, state, _other(x))) if x.is_floating_point() else None
        by_part = {}
        for k, part in enumerate(state):
            if state[part].is_floating_point():
                changed = State({**dict(state), part: another_state(state[part], 31 + k)}, state.batch_axis)
                by_part[part] = _moved(old, _step(call, changed))
        kept = _kept(call, state, x)
    return Trial(layer.name or "the cell", layer, call, by_input, by_part, _cut(patient, call, by_part), kept)


def _kept(call: Call, state: State, x: Tensor) -> str:
    """Return a part that a gate is applied to, and that comes out as it went in, "" where there is none.

    A context that a cell hands along for later steps comes out as it went in too, and no gate is applied to it.
    """
    if len(state) < 2:
        return ""
    with Tracer() as tracer:
        result = _step(call, state, x)
    after = call.layer.to_state(call.layer.split(result)[1], batch=call.rows)
    made = tracer.trace.makers()
    for name, part in state.items():
        if name not in after or not part.is_floating_point() or not same(after[name], part):
            continue
        products = [o for o in tracer.trace.named("mul", "__mul__", "__rmul__") if any(t is part for t in o.inputs)]
        gates = [made.origin(t) for o in products for t in o.inputs if t is not part]
        if any(gate is not None and gate.name in SIGMOIDS for gate in gates):
            return name
    return ""


def _other(x: Tensor) -> Tensor:
    generator = torch.Generator().manual_seed(41)
    return x + spread(x) * torch.randn(x.shape, generator=generator, dtype=torch.float64).to(x)


def _moved(old: Any, new: Any) -> float:
    """Return the largest difference between what a cell returned twice, relative to its size."""
    worst = 0.0
    theirs = tensors(new)
    for path, a in tensors(old).items():
        b = theirs.get(path)
        if b is None or a.shape != b.shape or not a.is_floating_point() or same(a, b):
            continue
        size = float(a.abs().nan_to_num().max()) or 1.0
        worst = max(worst, float((a - b).abs().nan_to_num(nan=1.0).max()) / size)
    return worst


def _cut(patient: Patient, call: Call, by_part: dict[str, float]) -> str:
    """Say what shows that a part of the state moves the next one and gets no gradient, "" where all parts get one."""
    with patient.afresh(), torch.enable_grad():
        patient.model.eval()
        state = _first_state(call).map(lambda part: part.clone().requires_grad_() if part.is_floating_point() else part)
        # A copy is handed in: the cell may change its state in place.
        result = _step(call, state.map(lambda part: part.clone()))
        outs = [t for t in tensors(result).values() if t.requires_grad]
        if not outs:
            return "what the cell returns has no graph"
        parts = {name: part for name, part in state.items() if part.requires_grad}
        total = torch.stack([projected(out) for out in outs]).sum()
        found = torch.autograd.grad(total, list(parts.values()), allow_unused=True)
    for name, gradient in zip(parts, found, strict=True):
        if by_part.get(name, 0.0) > patient.thresholds.reach and (gradient is None or not bool(gradient.any())):
            return (
                f"part {name!r} of the state moves the next one by {by_part[name]:.2g} of its size, and its "
                f"gradient is {'missing' if gradient is None else 'exactly 0'}"
            )
    return ""


@dataclass(slots=True, eq=False)
class StepCalls:
    """All calls, one step each, that one forward makes of a cell, or of a layer used as one."""

    calls: list[Call]
    with_graph: list[Call] = field(default_factory=list)
    fed: int | None = None  # the step of the input that all calls are fed, where it is one and the same

    @property
    def parts(self) -> list[str]:
        """The parts of the state."""
        return list(self.calls[0].state)

    @property
    def starts_anew(self) -> bool:
        """Whether no call is given a state."""
        return all(call.given is None for call in self.calls)

    def constant_parts(self) -> list[str]:
        """Return the parts that enter every step with the same values, though steps change them."""
        given = [call.given for call in self.calls]
        if any(state is None for state in given[1:]):
            return []
        states = [state for state in given if state is not None]
        found = []
        for part in self.parts:
            values = [state[part] for state in states if part in state]
            ends = [call.state[part] for call in self.calls]
            if len(values) < 2 or any(value.shape != values[0].shape for value in values):
                continue
            if all(same(value, values[0]) for value in values) and not all(
                end.shape == values[0].shape and same(end, values[0]) for end in ends
            ):
                found.append(part)
        return found

    def detached(self) -> int:
        """Return at how many steps a part of the state arrives without the graph it left the last step with."""
        count = 0
        for before, after in pairwise(self.with_graph):
            ended, given = before.state, after.given
            count += given is not None and any(
                name in given and part.requires_grad and not given[name].requires_grad and same(given[name], part)
                for name, part in ended.items()
            )
        return count


class SteppedCells(dict[str, StepCalls], PatientProbe):
    """For every layer that a forward steps along time, by its label, all its calls."""

    @classmethod
    def measure(cls, patient: Patient) -> SteppedCells:
        """Take the calls of the plain call, and those of one with gradients."""
        found = cls()
        for layer in patient.layers:
            calls = patient[PlainCall].calls.of(layer)
            many = len(calls) >= 3 or (len(calls) == 2 == patient.inputs.steps)
            if many and all(call.steps == 1 for call in calls) and len({call.rows for call in calls}) == 1:
                try:
                    graph = patient[Backward].outcome.calls.of(layer)
                except Exception:  # reported where gradients are asked for
                    graph = []
                found[layer.label] = StepCalls(calls, graph, _one_step_of(patient, calls))
        return found


def _one_step_of(patient: Patient, calls: list[Call]) -> int | None:
    """Return the step of the input that all calls are fed; None where they are fed several, or something else."""
    inputs, first = patient.inputs, calls[0].input
    argument, x = inputs.argument(inputs.main), inputs.get(inputs.main)
    if not isinstance(x, Tensor) or not isinstance(first, Tensor) or argument.time is None or not inputs.batched:
        return None
    if any(not isinstance(call.input, Tensor) or not same(call.input, first) for call in calls):
        return None
    steps = x.movedim((argument.rows or 0, argument.time), (0, 1))  # (batch, time, ...)
    alike = [t for t in range(steps.shape[1]) if same(steps[:, t], first)]
    return alike[0] if len(alike) == 1 else None


@dataclass(frozen=True, slots=True, eq=False)
class Drive:
    """A user's cell driven by large inputs for some steps."""

    name: str
    bounds: dict[str, float]  # part -> largest |value| on the way
    traces: list[Operations]  # of a few steps with inputs of ordinary size
    hard: Operations  # of one with inputs of size 100, from the first of those states
    states: list[State]  # the states those steps were given
    results: list[Any]
    next_state: Tensor  # the first part of the state after the last of them


class CellDrives(tuple[Drive, ...], PatientProbe):
    """Every cell that the user wrote, driven by large inputs."""

    @classmethod
    def measure(cls, patient: Patient) -> CellDrives:
        """Drive each cell with large inputs, and write down a few ordinary steps."""
        found = []
        for trial in patient[CellTrials]:
            if not _input(trial.call).is_floating_point():
                continue
            with patient.afresh(), torch.no_grad():
                patient.model.eval()
                found.append(_drive(trial))
        return cls(found)


def _drive(trial: Trial) -> Drive:
    call, layer, x = trial.call, trial.layer, _input(trial.call)
    generator = torch.Generator().manual_seed(51)
    state = call.given if call.given is not None else layer.initial(call.rows)
    bounds: dict[str, float] = {}
    for _ in range(40):
        noise = torch.randn(x.shape, generator=generator, dtype=torch.float64).to(x)
        _, native = layer.split(_step(call, state, 100 * noise))
        state = layer.to_state(native, batch=call.rows)
        for part, value in state.items():
            if value.is_floating_point():
                bounds[part] = max(bounds.get(part, 0.0), float(value.abs().nan_to_num(nan=float("inf")).max()))
    traces, states, results = [], [], []
    inner = _first_state(call)
    for k in range(3):
        noise = torch.randn(x.shape, generator=generator, dtype=torch.float64).to(x)
        given = inner.map(lambda part, k=k: another_state(part, 61 + k) if part.is_floating_point() else part)  # type: ignore[misc]
        with Tracer() as tracer:
            result = _step(call, given, x + noise)
        traces.append(tracer.trace)
        states.append(given)
        results.append(result)
    after = layer.to_state(layer.split(results[-1])[1], batch=call.rows)
    noise = torch.randn(x.shape, generator=generator, dtype=torch.float64).to(x)
    with Tracer() as tracer:
        _step(call, states[0], 100 * noise)
    return Drive(trial.name, bounds, traces, tracer.trace, states, results, next(iter(after.values())))
