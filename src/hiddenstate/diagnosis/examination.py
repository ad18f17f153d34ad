"""All checks, one after the other, and what is told of what they found."""

from __future__ import annotations

import warnings
from dataclasses import replace

from ..errors import HiddenStateWarning
from ..measure import tracked
from .admission import admit, settle
from .budget import timed
from .catalog import CONSEQUENCES
from .checks import CHECKS, STATIC
from .checks.rows import another_size
from .checks.states import infinite_values
from .finding import Finding
from .inputs import Cut
from .patient import Patient, Run
from .probes.shapes import base
from .report import Report

__all__ = ["admit", "examined"]


def examined(patient: Patient, name: str, unwanted: frozenset[str]) -> Report:
    """Return the report of all checks; the model comes back as it was."""
    findings: list[Finding] = []
    failed: dict[str, str] = {}
    broken = unheard = ""
    with patient.undisturbed():
        patient.look()
        try:
            first, seconds = timed(lambda: patient.run(collect=True))
            unheard = _unheard(patient, first)
            settle(patient, first, seconds)
            if patient.cut is not None and (bad := infinite_values(first)) is not None:
                findings.append(bad)  # a piece may well hold none
            base(patient)
        except Exception as error:  # the user's model itself fails: what needs no call can still be said
            broken = f"{type(error).__name__}: {error}"
            rescued = another_size(patient, str(error))
            findings += [rescued] if rescued is not None else []
        told_of = {finding.code for finding in findings}
        checks = {code: check for code, check in (STATIC if broken else CHECKS).items() if code not in told_of}
        for code, check in tracked(list(checks.items()), "diagnosing", len(checks)):
            try:
                found = check(patient)
            except Exception as error:  # one check's failure is no reason to miss what others find
                if code not in unwanted:
                    failed[code] = f"{type(error).__name__}: {_first_line(error)}"
                continue
            found = [found] if isinstance(found, Finding) else (found or [])
            findings += found if code in STATIC else [_with_cut(finding, patient.cut) for finding in found]
    if unheard:  # here, since all warnings within the examination are the model's own, and silenced
        warnings.warn(f"hs.diagnose({name}): {unheard}.", HiddenStateWarning, stacklevel=3)
        patient.assumed.append(unheard)
    if not findings and not broken:
        patient.check_recurrent()  # at the end: a forgotten recurrent term is a finding, not a model without recurrence
    # What is not wanted is left out last, so that its consequences do not take its place.
    told = [finding for finding in _told(findings) if finding.code not in unwanted]
    return Report(told, model=name, assumed=patient.assumed, failed=failed, broken=broken)


def _unheard(patient: Patient, run: Run) -> str:
    """Say which layers nothing can be told of, "" where all were heard."""
    silent = [
        layer.label for layer in patient.layers if not run.calls.of(layer) and layer.label not in run.calls.unread
    ]
    told = [f"{name} was called in a way that cannot be read ({why})" for name, why in run.calls.unread.items()]
    if silent:
        was, it = ("was", "it") if len(silent) == 1 else ("were", "them")
        told.insert(
            0,
            f"{', '.join(silent)} {was} not used in this call, so nothing is said of {it}; a layer whose weights are "
            f"used without calling it is not heard",
        )
    return "; ".join(told)


def _with_cut(finding: Finding, cut: Cut | None) -> Finding:
    """Let the evidence say how much of the input it was measured on."""
    if cut is None:
        return finding
    text = str(cut)
    return replace(finding, evidence=f"{finding.evidence} {text[0].upper()}{text[1:]}.")


def _told(findings: list[Finding]) -> list[Finding]:
    """Leave out what is only the consequence of something graver that is told."""
    grave = list(dict.fromkeys(finding.code for finding in findings if finding.severity != "note"))
    waiting = list(dict.fromkeys(finding.code for finding in findings))
    kept: set[str] = set()
    while waiting:
        # What nothing explains is told; in a circle, what the checks list first.
        free = [c for c in waiting if not any(c in CONSEQUENCES.get(w, ()) for w in waiting if w in grave and w != c)]
        told = free or waiting[:1]
        kept |= set(told)
        hidden = {code for cause in told if cause in grave for code in CONSEQUENCES.get(cause, ())}
        waiting = [code for code in waiting if code not in kept and code not in hidden]
    return [finding for finding in findings if finding.code in kept]


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0][:300] if lines else ""
