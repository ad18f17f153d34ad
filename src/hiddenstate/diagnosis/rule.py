"""A rule of the doctor, and the symptom that it reports."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from .outcome import Outcome
from .patient import Patient, PatientProbe

Severity = Literal["error", "warning", "note"]


@dataclass(frozen=True, slots=True)
class Symptom:
    """What a rule reports; with the code and the title of the rule it becomes a `Finding`."""

    severity: Severity
    where: str  # a layer, a parameter, or a line of the user's forward
    evidence: str  # the measured number and the threshold it crossed
    cause: str
    advice: str
    numbers: Mapping[str, float] = field(default_factory=dict)  # the evidence for programs
    title: str = ""  # where that of the rule does not fit


@dataclass(frozen=True, slots=True, eq=False)
class Rule:
    """One code of the doctor. The docstring of the module that makes it is its page in docs/findings."""

    code: str
    title: str
    check: Callable[[Patient], Symptom | Sequence[Symptom] | None]  # silent where all is well
    probes: tuple[type[PatientProbe], ...] = ()  # all that `check` asks the patient for
    explains: tuple[str, ...] = ()  # codes that are left out where this one is an error or a warning
    monitored: bool = False  # only a training run shows it, and `Monitor` tells it
    static: bool = False  # `check` has something to say of a model that cannot be called, too
    check_whole: Callable[[Outcome], Symptom | None] | None = None  # of the whole input, where a piece is examined
    check_failure: Callable[[Patient, str], Symptom | None] | None = None  # of a model whose plain call raised this
