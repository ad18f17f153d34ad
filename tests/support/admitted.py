"""A patient under examination, ready to be asked for what a probe shows."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from hiddenstate.diagnosis.admission import admit
from hiddenstate.diagnosis.first_call import settle
from hiddenstate.diagnosis.patient import Patient
from hiddenstate.diagnosis.thresholds import Thresholds


@contextmanager
def admitted(
    model: nn.Module, *inputs: Any, lengths: Any = None, batch_axis: int | None = None, **more: Any
) -> Iterator[Patient]:
    """Admit a model as `hs.diagnose` does, with the whole of its input."""
    patient = admit(model, inputs, lengths=lengths, axes=(batch_axis, None), thresholds=Thresholds(), **more)
    with patient.undisturbed():
        settle(patient, patient.run(collect=True), 0.0)
        yield patient
