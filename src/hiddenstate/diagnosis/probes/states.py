"""The states of every track, in the plain call and in one with rows and steps unlike each other, and what they show."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ...measure import saturation
from ...recording import Trajectory, record
from ..inputs import ModelInputs
from ..outcome import SIGMOIDS
from ..patient import Patient, PatientProbe
from .calls import TracedCall


class RecordedStates(dict[str, Trajectory], PatientProbe):
    """Every track of the plain call, with its gates."""

    @classmethod
    def measure(cls, patient: Patient) -> RecordedStates:
        """Record the plain call."""
        return cls(recorded(patient, patient.inputs, gates=True))

    def finite(self) -> dict[str, Trajectory]:
        """Return the tracks that hold numbers, and no NaN or Inf among them."""
        return {name: track for name, track in self.items() if bool(track.h.isfinite().all()) and track.h.numel()}


class VariedStates(dict[str, Trajectory], PatientProbe):
    """Every track of a call in which all rows and steps differ."""

    @classmethod
    def measure(cls, patient: Patient) -> VariedStates:
        """Record a call with other values everywhere."""
        inputs = patient.inputs
        everywhere = torch.ones(inputs.batch, dtype=torch.bool)
        return cls(recorded(patient, inputs.other_rows(everywhere, seed=101), gates=False))


def recorded(patient: Patient, inputs: ModelInputs, *, gates: bool) -> dict[str, Trajectory]:
    """Return every track of one call that holds states of real numbers."""
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


@dataclass(frozen=True, slots=True)
class SaturatedStates(PatientProbe):
    """The first track that is pressed against the ends of its range."""

    track: str = ""  # "" where none is
    share: float = 0.0  # of values of |h| beyond the limit
    gates: float = 0.0  # share of gate values that are nearly open or nearly shut
    mean_abs: float = 0.0  # of h
    by_states: bool = False  # the states tell, and not the gates alone

    @classmethod
    def measure(cls, patient: Patient) -> SaturatedStates:
        """Measure the saturation of every track of the plain call."""
        limits = patient.thresholds
        for name, track in patient[RecordedStates].finite().items():
            everywhere = patient.survey.saturation.get(name) if patient.survey is not None else None
            measured = everywhere or saturation(track, limits.saturated)
            gates = [gate.share for key, gate in measured.gates.items() if gate.range == "sigmoid" and key]
            by_gates = sum(gates) / len(gates) if gates else 0.0
            by_states = measured.share > limits.saturated_share and (track.kind in _BOUNDED or measured.max_abs <= 1)
            if by_states or by_gates > limits.saturated_gates:
                return cls(name, measured.share, by_gates, measured.mean_abs, by_states)
        return cls._of_own_gates(patient)

    @classmethod
    def _of_own_gates(cls, patient: Patient) -> SaturatedStates:
        """Look at the sigmoids that a loop of the user's makes at each step."""
        lines: dict[str, list[Tensor]] = {}
        trace = patient[TracedCall].trace
        made = trace.makers()
        # A gate is a factor of something; other sigmoids are slopes for spikes, or outputs.
        factors = {
            id(made.source(t)) for o in trace.named("mul", "__mul__", "__rmul__", "addcmul", "lerp") for t in o.inputs
        }
        for operation in trace:
            gate = operation.name in SIGMOIDS and id(operation.output) in factors
            rows = isinstance(operation.output, Tensor) and operation.output.shape[:1] == (patient.inputs.batch,)
            if gate and operation.line and rows:  # a factor that is the same for all rows is a decay, and no gate
                lines.setdefault(operation.line, []).append(operation.output.detach().flatten())
        gates = [torch.cat(values) for values in lines.values() if len(values) >= max(3, patient.inputs.steps - 1)]
        if not gates:
            return cls()
        together = torch.cat(gates)
        share = float(((together < 0.05) | (together > 0.95)).float().mean())
        line = next(line for line, values in lines.items() if len(values) >= 3)
        return cls(line, 0.0, share, 0.0) if share > patient.thresholds.saturated_gates else cls()


_BOUNDED = ("lstm", "gru", "rnn", "lstm_cell", "gru_cell", "rnn_cell")  # torch's own: |h| ≤ 1


@dataclass(frozen=True, slots=True)
class IdenticalRows(PatientProbe):
    """The first track whose rows have the same states, though the rows of the input differ."""

    track: str = ""  # "" where there is none
    rows: int = 0
    spread: float = 0.0  # over the rows, relative to the size of the states

    @classmethod
    def measure(cls, patient: Patient) -> IdenticalRows:
        """Compare the rows of every track of a call in which all rows differ."""
        if not patient.inputs.batched or patient.inputs.batch < 2:
            return cls()
        for name, track in patient[VariedStates].items():
            h = track.h
            if len(h) != patient.inputs.batch or not bool(h.any()) or not bool(h.isfinite().all()):
                continue
            steps = int(track.valid.all(0).sum())
            spread = float((h[:, :steps].amax(0) - h[:, :steps].amin(0)).max()) if steps else 1.0
            size = float(h.abs().max())
            if spread <= patient.thresholds.identical * size:
                return cls(name, len(h), spread / size)
        return cls()


@dataclass(frozen=True, slots=True)
class ConstantStates(PatientProbe):
    """The first track that does not change from step to step, though the input does."""

    track: str = ""  # "" where there is none
    steps: int = 0
    spread: float = 0.0  # over the steps, relative to the size of the states

    @classmethod
    def measure(cls, patient: Patient) -> ConstantStates:
        """Compare the steps of every track of a call in which all steps differ."""
        for name, track in patient[VariedStates].items():
            h = track.h
            steps = int(track.valid.all(0).sum())
            if steps < 3 or not bool(h.any()) or not bool(h.isfinite().all()):
                continue
            spread = float((h[:, :steps].amax(1) - h[:, :steps].amin(1)).max())
            size = float(h.abs().max())
            if spread <= patient.thresholds.identical * size:
                return cls(name, steps, spread / size)
        return cls()
