"""The examination: one call, all checks, a report."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn

from ..errors import BadInput, DiagnosisFailed
from .admission import admit, settle
from .catalog import CONSEQUENCES, TITLES
from .checks import CHECKS, STATIC
from .finding import RANK, Finding
from .patient import Patient
from .probes.shapes import base
from .progress import tracked
from .report import Report
from .thresholds import Thresholds


def diagnose(
    model: nn.Module,
    *inputs: Any,
    lengths: Tensor | Sequence[int] | None = None,
    targets: Any = None,
    loss: Callable[[Any, Any], Tensor] | None = None,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None = None,
    batch_axis: int = 0,
    ignore: Iterable[str] = (),
    thresholds: Mapping[str, float] | None = None,
    fail_on: Literal["error", "warning", "note"] | None = None,
) -> Report:
    """Return a Report of what is wrong with the hidden state of `model`, how we know, and what to change.

    The model is called as `model(*inputs)`, many times, and comes back as it was. A healthy model gets no finding:

    >>> model = torch.nn.LSTM(3, 8, batch_first=True)
    >>> diagnose(model, torch.randn(4, 10, 3)).ok
    True

    Args:
        model: Any model with recurrent layers, a layer, or a cell. For a cell or a layer inputs may be left out.
        inputs: What the model is called with.
        lengths: The real steps of each row; a model that needs them has them among its inputs as well.
        targets: What `loss` compares the output with.
        loss: Called as `loss(output, targets)` with the raw output.
        optimizer: The optimizer, or several, that should train every parameter.
        batch_axis: Where the rows of the sequences are.
        ignore: Codes that are not wanted, such as `["HS501"]`.
        thresholds: Other limits, by name: see `hiddenstate.diagnosis.Thresholds`.
        fail_on: Raise `DiagnosisFailed` where a finding is this grave, or graver.
    """
    if not isinstance(model, nn.Module):
        raise BadInput(f"hs.diagnose takes an nn.Module, but this is {type(model).__name__}.")
    unwanted = _known_codes(ignore)
    if fail_on is not None and fail_on not in RANK:
        raise BadInput(f"fail_on is 'error', 'warning', 'note' or None, but is {fail_on!r}.")
    if optimizer is None:
        optimizers: tuple[torch.optim.Optimizer, ...] = ()
    else:
        optimizers = tuple(optimizer) if isinstance(optimizer, list | tuple) else (optimizer,)  # type: ignore[assignment]
    patient = admit(
        model,
        inputs,
        lengths=lengths,
        batch_axis=batch_axis,
        thresholds=Thresholds.adjusted(thresholds),
        targets=targets,
        loss=loss,
        optimizers=optimizers,
    )
    report = _examined(patient, type(model).__name__, unwanted)
    if fail_on is not None and report.worst() and RANK[report.worst()] <= RANK[fail_on]:
        raise DiagnosisFailed(f"the model has a finding of severity {report.worst()!r}.\n{report.text()}")
    return report


def _known_codes(ignore: Iterable[str]) -> frozenset[str]:
    codes = frozenset([ignore] if isinstance(ignore, str) else ignore)
    unknown = sorted(codes - TITLES.keys())
    if unknown:
        raise BadInput(f"there is no finding {unknown[0]!r} to ignore: codes go from HS101 to HS504.")
    return codes


def _examined(patient: Patient, name: str, unwanted: frozenset[str]) -> Report:
    findings: list[Finding] = []
    failed: dict[str, str] = {}
    broken = ""
    with patient.undisturbed():
        try:
            settle(patient, patient.run(watch=True))
            base(patient)
        except Exception as error:  # the user's model itself fails: what needs no call can still be said
            broken = f"{type(error).__name__}: {error}"
        checks = STATIC if broken else CHECKS
        for code, check in tracked(list(checks.items()), "diagnosing", len(checks)):
            if code in unwanted:
                continue
            try:
                found = check(patient)
            except Exception as error:  # one check's failure is no reason to miss what others find
                failed[code] = f"{type(error).__name__}: {_first_line(error)}"
                continue
            findings += [found] if isinstance(found, Finding) else (found or [])
    return Report(_told(findings), model=name, assumed=patient.assumed, failed=failed, broken=broken)


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
