"""The states of every track in the plain call, and in one with rows and steps unlike each other."""

from __future__ import annotations

import torch
from torch import Tensor

from ...recording import Trajectory, record
from ..inputs import Inputs
from ..patient import Patient, probe


@probe
def recorded(patient: Patient) -> dict[str, Trajectory]:
    """Return every track of the plain call, with its gates."""
    return _recorded(patient, patient.inputs, gates=True)


@probe
def varied(patient: Patient) -> dict[str, Trajectory]:
    """Return every track of a call in which all rows and steps differ."""
    inputs = patient.inputs
    return _recorded(patient, inputs.other_rows(torch.ones(inputs.batch, dtype=torch.bool), seed=101), gates=False)


def _recorded(patient: Patient, inputs: Inputs, *, gates: bool) -> dict[str, Trajectory]:
    if not patient.layers and not patient.seen:
        return {}
    with patient.afresh():
        recorder = record(patient.model, gates=gates)
        with recorder as recording:
            patient.call(inputs)
        tracks = {name: recording.runs(name) for name in recording}
    # An iteration settles, on purpose, and a token that is fed back is no state of real numbers.
    states = {name: runs for name, runs in tracks.items() if runs and runs[0].kind != "iteration"}
    return {name: _joined(runs) for name, runs in states.items() if runs[0].h.is_floating_point()}


def _joined(runs: list[Trajectory]) -> Trajectory:
    """Join runs of one step each, as a fused layer called in a loop makes them."""
    first = runs[0]
    if len(runs) < 2 or any(run.h.shape != first.h.shape or run.h.shape[1] != 1 for run in runs):
        return first
    h = torch.cat([run.h for run in runs], dim=1)
    c = torch.cat([run.c for run in runs if run.c is not None], dim=1) if first.c is not None else None
    gates = {name: torch.cat([run.gates[name] for run in runs], dim=1) for name in first.gates}
    return Trajectory(h, c=c, gates=gates, track=first.track, kind=first.kind)


def real(trajectory: Trajectory, values: Tensor) -> Tensor:
    """Return the values at real steps: (steps of all rows, unit)."""
    return values[trajectory.valid.to(values.device)]
