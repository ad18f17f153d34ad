"""Probe: how gradients change on their way back through time."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from ...cells import Call, unheard
from ..outcome import steps_of_rows
from ..patient import Patient, PatientProbe
from .calls import PlainCall
from .cells import SteppedCells
from .gradients import Backward, gradients, projected

FADING = 0.2  # per step: below what a fresh network of any kind does


def per_step(sizes: Tensor) -> float:
    """Return the factor of one step in `sizes (time,)`, from the earliest step that float precision can still hold."""
    last = float(sizes[-1])
    held = (sizes > 1e-30).nonzero().flatten()
    begin = int(held[0]) if len(held) else len(sizes) - 1
    steps = len(sizes) - 1 - begin
    return (float(sizes[begin]) / last) ** (1 / steps) if steps > 0 and last > 0 else 0.0


@dataclass(frozen=True, slots=True)
class Slope:
    """How the gradient of a layer's last state changes on its way back to the first step."""

    name: str
    ratio: float  # first to last
    steps: int
    per_step: float  # the factor of one step
    beyond: float = 1.0  # what the steps that a cut left out would add to the ratio, at this factor

    @property
    def whole(self) -> float:
        """The ratio over all steps that the user gave."""
        return self.ratio * self.beyond


class Slopes(tuple[Slope, ...], PatientProbe):
    """For each layer, how gradients change on their way back through time."""

    @classmethod
    def measure(cls, patient: Patient) -> Slopes:
        """Take, for each layer, the gradient of its last state to its input at every step."""
        found = []
        done: set[str] = set()
        for call in patient[Backward].outcome.calls:
            if call.layer.fused and call.steps > 1 and call.layer.name not in done:
                done.add(call.layer.name)
                sizes = _fused(patient, call)
                if sizes is not None:
                    found.append(_slope(patient, call.layer.label, sizes))
        for name, steps in patient[SteppedCells].items():
            sizes = _stepped(steps.with_graph)
            if sizes is not None:
                found.append(_slope(patient, name, sizes))
        if not patient[PlainCall].calls and patient.seen and patient[Backward].connected:
            sizes = patient[Backward].steps.get("the input")  # a loop that is written out: of the last output
            if sizes is not None and patient.inputs.lengths is None and sizes.shape[1] > 1:
                found.append(_slope(patient, patient.seen[0].label, sizes.double().norm(dim=0)))
        return cls(slope for slope in found if slope is not None)


def _slope(patient: Patient, name: str, sizes: Tensor) -> Slope | None:
    """Compare the first steps with the last of `sizes (time,)`."""
    reached = sizes.nonzero()[:, 0]
    sizes = sizes[: int(reached[-1]) + 1] if len(reached) else sizes  # a state may not follow the last steps yet
    if len(sizes) < 2:
        return None
    first, last = float(sizes[0]), float(sizes[-1])
    real = sizes[sizes > 0]
    if first == 0 and len(real) and float(real.min()) > 1e-30 * last:
        return None  # not faded, but cut: by a reset, a mask, or a detach
    if not (first >= 0 and last > 0):
        return None
    factor, piece = per_step(sizes), patient.excerpt
    left_out = piece.all_steps - piece.steps if piece is not None and piece.steps == len(sizes) else 0
    beyond = math.exp(max(-700.0, min(700.0, left_out * math.log(factor)))) if left_out and factor > 0 else 1.0
    return Slope(name, first / last, len(sizes), factor, beyond)


def _fused(patient: Patient, call: Call) -> Tensor | None:
    """Return the size of the gradient at each step, in the order of the forward direction: (time,)."""
    with patient.afresh(), torch.enable_grad(), torch.backends.cudnn.flags(enabled=False):
        patient.model.eval()
        source, lengths = call.x, steps_of_rows(call)
        whole = lengths == lengths.max()  # rows without padding tell as much as all
        x = source.detach()[whole.to(source.device)].clone().requires_grad_()
        spec = call.layer.spec
        if not x.is_floating_point():
            return None
        given = call.given
        state = None if given is None else given.detach().select(whole.nonzero()[:, 0].tolist())
        again = call.fed(x if spec.batch_first else x.transpose(0, 1))
        again = again if state is None else again.handed(state)
        with unheard():
            again = again.returned(call.layer.module(*again.args, **again.kwargs))
        last = again.output[:, -1]
        last = last[:, : last.shape[1] // spec.directions]  # the forward direction
        if not last.requires_grad:
            return None
        (gradient,) = gradients(projected(last), [x])
    if gradient is None:
        return None
    sizes: Tensor = gradient.abs().double().flatten(2).norm(dim=2).norm(dim=0)
    return sizes.cpu()


def _stepped(calls: list[Call]) -> Tensor | None:
    if len(calls) < 2:
        return None
    inputs = [call.input for call in calls if isinstance(call.input, Tensor)]
    last = [part for part in calls[-1].state.values() if part.requires_grad]
    if not last or not all(x.requires_grad for x in inputs):
        return None
    found = gradients(torch.stack([projected(part) for part in last]).sum(), inputs)
    sizes = [0.0 if g is None else float(g.double().norm()) for g in found]
    return torch.tensor(sizes, dtype=torch.float64)


def over_all_steps(patient: Patient, slope: Slope, *, crossed: bool) -> str:
    """Say what all steps would make of a ratio that has not `crossed` its limit over those that were measured."""
    if crossed or patient.excerpt is None:
        return ""
    return f", which over all {patient.excerpt.all_steps} steps would make {slope.whole:.2g}"
