"""The plain call and its variations: traced, with a row less, made again, with other seeds."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from ...state import mapped
from ..difference import gap
from ..inputs import ModelInputs
from ..outcome import Outcome
from ..patient import Patient, PatientProbe
from ..unregistered import held_tensors


class PlainCall(Outcome, PatientProbe):
    """The model called in eval mode as the user calls it, with the calls of all its layers."""

    @classmethod
    def measure(cls, patient: Patient) -> PlainCall:
        """Call the model once."""
        return cls.of(patient.run(collect=True))


class TracedCall(Outcome, PatientProbe):
    """The plain call with every operation written down."""

    @classmethod
    def measure(cls, patient: Patient) -> TracedCall:
        """Call the model once, traced; torch may take other kernels then, which differ in their last bits."""
        return cls.of(patient.run(trace=True, collect=True))


@dataclass(frozen=True, slots=True, eq=False)
class FewerRows(PatientProbe):
    """The plain call with one row less."""

    outcome: Outcome | None  # None where there is no row to leave out, or the model refuses

    @classmethod
    def measure(cls, patient: Patient) -> FewerRows:
        """Leave out the last row."""
        inputs = patient.inputs
        if not inputs.batched or inputs.batch < 2:
            return cls(None)
        return cls(attempt(patient, inputs.select(range(inputs.batch - 1))))


def attempt(patient: Patient, inputs: ModelInputs) -> Outcome | None:
    """Call the model with other inputs; None where it does not take them."""
    try:
        return patient.run(inputs, collect=True)
    except Exception:  # a trial: a model of fixed length refuses, and that is its right
        return None


@dataclass(frozen=True, slots=True, eq=False)
class RepeatedCall(PatientProbe):
    """Two calls with the same input and seed, one after the other."""

    gap: float  # the largest difference between their outputs, relative to their size
    changed: dict[str, Tensor]  # attributes that hold another tensor after the calls than before

    @classmethod
    def measure(cls, patient: Patient) -> RepeatedCall:
        """Call the model twice in eval mode, without putting anything back in between."""
        before = held_tensors(patient.model)
        with patient.afresh():
            first = patient.call()
            # The first result may be a tensor that the second call writes into.
            copies = mapped(first.result, lambda _, end: end.detach().clone() if isinstance(end, Tensor) else end)
            first = Outcome(copies, first.inputs, first.calls, first.trace)
            second = patient.call()
            after = held_tensors(patient.model)
        changed = {name: t for name, t in after.items() if name not in before or before[name] is not t}
        return cls(gap(first, second), changed)


@dataclass(frozen=True, slots=True, eq=False)
class OtherSeed(PatientProbe):
    """Two calls in eval mode with different seeds."""

    first: Outcome
    second: Outcome
    gap: float  # the largest difference between their outputs, relative to their size

    @classmethod
    def measure(cls, patient: Patient) -> OtherSeed:
        """Call the model with two seeds, neither of them traced: a trace would change the last bits of one."""
        first, second = patient.run(number=0, collect=True), patient.run(number=1, collect=True)
        return cls(first, second, gap(first, second))
