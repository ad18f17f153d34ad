"""`diagnose`: asks all rules in turn, and decides which of their symptoms to report."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from ..cells import BegunDataSet, as_tensors, is_data_set, read_batch, refuse_clashes, unwrap
from ..errors import BadInput, DiagnosisFailed, HiddenStateWarning
from ..measure import survey, tracked
from .admission import admit
from .first_call import settle, timed
from .outcome import Outcome
from .patient import Patient
from .probes.calls import PlainCall
from .probes.handed import StateGivenBack
from .report import RANK, Finding, Report
from .rule import Rule, Symptom
from .rules import RULES, TITLES
from .thresholds import Thresholds


def diagnose(
    model: nn.Module,
    *inputs: Any,
    lengths: Tensor | Sequence[int] | None = None,
    targets: Any = None,
    loss: Callable[[Any, Any], Tensor] | None = None,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None = None,
    batch_axis: int | None = None,
    time_axis: int | None = None,
    ignore: Iterable[str] = (),
    thresholds: Mapping[str, float] | None = None,
    fail_on: Literal["error", "warning", "note"] | None = None,
    call: Callable[..., Any] | None = None,
    **kwargs: Any,
) -> Report:
    """Return a Report of what is wrong with the hidden state of `model`, how we know, and what to change.

    The model is called as `model(*inputs, **kwargs)`, many times, and comes back as it was. A healthy model gets no
    finding:

    >>> model = torch.nn.LSTM(3, 8, batch_first=True)
    >>> diagnose(model, torch.randn(4, 10, 3)).ok
    True

    Args:
        model: Any model with recurrent layers, a layer, or a cell. For a cell or a layer inputs may be left out.
        inputs: What the model is called with; also nested, as dicts of tensors; or a DataLoader: experiments are made
            on its first batch, and the states of all batches are looked at, one batch at a time.
        lengths: The real steps of each row; a model that needs them has them among its inputs as well, and where they
            are named so in its forward, that is enough.
        targets: What `loss` compares the output with.
        loss: Called as `loss(output, targets)` with the raw output.
        optimizer: The optimizer, or several, that should train every parameter.
        batch_axis: Where the rows of the sequences are. Where it is not told, `lengths`, a state or targets with one
            entry for each row tell; else rows are on axis 0, also where a layer takes axis 1 for them: a forgotten
            `batch_first=True` looks just like that, so it is a finding (HS101) that names both ways out.
        time_axis: Where their steps are.
        ignore: Codes that are not wanted, such as `["HS501"]`.
        thresholds: Other limits, by name: see `hiddenstate.diagnosis.Thresholds`.
        fail_on: Raise `DiagnosisFailed` where a finding is this grave, or graver.
        call: How the model is called, where that is not by its forward: `call=lambda model: model.act(x, state)`. The
            tensors that the function reads are the inputs; or `call(model, *inputs)`, of a DataLoader `call(model,
            batch)`.
        kwargs: What the model is called with by name, as in `diagnose(model, **batch)`.
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
    if call is not None and kwargs:
        raise BadInput(f"call= says how the model is called, so {next(iter(kwargs))}= has nowhere to go: put it there.")
    if call is None:
        inputs, kwargs = as_tensors(unwrap(model), inputs), as_tensors(unwrap(model), kwargs)
    data = BegunDataSet(inputs[0]) if len(inputs) == 1 and is_data_set(inputs[0]) else None
    if data is not None and call is not None:
        inputs = (data.first,)
    elif data is not None:
        batch = read_batch(model, data.first, lengths=lengths)
        inputs, lengths = batch.args, batch.lengths
        if targets is None and loss is not None and batch.rest:
            targets = batch.rest[0] if len(batch.rest) == 1 else batch.rest
    elif call is None:
        refuse_clashes(model, inputs, {"lengths": lengths, "targets": targets, "loss": loss, "optimizer": optimizer})
    patient = admit(
        model,
        inputs,
        kwargs,
        call=call,
        lengths=lengths,
        axes=(batch_axis, time_axis),
        thresholds=Thresholds.adjusted(thresholds),
        targets=targets,
        loss=loss,
        optimizers=optimizers,
    )
    if data is not None:
        _survey(model, patient, data, call)
    report = _examined(patient, type(model).__name__, unwanted)
    report.source = _source(model)
    if fail_on is not None and report.worst() and RANK[report.worst()] <= RANK[fail_on]:
        raise DiagnosisFailed(f"the model has a finding of severity {report.worst()!r}.\n{report.text()}")
    return report


def _source(model: nn.Module) -> tuple[str, int] | None:
    """Return file and line of the class of a model, as seen from here, where it is not torch's."""
    kind = type(unwrap(model))
    try:
        file, line = Path(inspect.getsourcefile(kind) or ""), inspect.getsourcelines(kind)[1]
        return None if kind.__module__.startswith("torch.") else (file.relative_to(Path.cwd()).as_posix(), line)
    except (OSError, TypeError, ValueError):  # made on the fly, or outside of this folder
        return None


def _survey(model: nn.Module, patient: Patient, data: BegunDataSet, call: Callable[..., Any] | None) -> None:
    """Look at the states of all batches; where one cannot be run, say so."""
    try:
        found = survey(model, data, threshold=patient.thresholds.saturated, gates=True, call=call)
    except BadInput as error:
        patient.assumed.append(f"the first batch alone was examined: {error}")
        return
    patient.survey = found
    patient.assumed.append(
        f"experiments were made on the first batch; states were looked at in {found.batches} batches, "
        f"{found.rows:,} rows and {found.steps:,} steps{found.padding}"
    )


# What may be said of a model in which nothing recurs, as it was meant to: a state that is made anew at each step, kept
# with its graph or drawn at random, and rows that are taken for steps.
_WITHOUT = ("HS103", "HS203", "HS205", "HS206", "HS401", "HS504")


def _known_codes(ignore: Iterable[str]) -> frozenset[str]:
    codes = frozenset([ignore] if isinstance(ignore, str) else ignore)
    unknown = sorted(codes - TITLES.keys())
    if unknown:
        raise BadInput(f"there is no finding {unknown[0]!r} to ignore: codes go from HS101 to HS505.")
    return codes


def _examined(patient: Patient, name: str, unwanted: frozenset[str]) -> Report:
    """Return the report of all rules; the model comes back as it was."""
    findings: list[Finding] = []
    failed: dict[str, str] = {}
    broken = unheard = ""
    with patient.undisturbed():
        patient.look()
        try:
            first, seconds = timed(lambda: patient.run(collect=True))
            unheard = _unheard(patient, first)
            settle(patient, first, seconds)
            if patient.excerpt is not None:  # a piece may well not show what the whole does
                found = [(rule, rule.check_whole(first)) for rule in RULES if rule.check_whole is not None]
                findings += [_finding(rule, symptom) for rule, symptom in found if symptom is not None]
            patient[PlainCall]  # what all rules begin with: where it fails, the model cannot be examined
        except Exception as error:  # the user's model itself fails: what needs no call can still be said
            broken = f"{type(error).__name__}: {error}"
            found = [
                (rule, rule.check_failure(patient, str(error))) for rule in RULES if rule.check_failure is not None
            ]
            findings += [_finding(rule, symptom) for rule, symptom in found if symptom is not None]
        done = {finding.code for finding in findings}
        rules = [rule for rule in RULES if rule.code not in done and (rule.static or not broken) and not rule.monitored]
        for rule in tracked(rules, "diagnosing", len(rules)):
            try:
                with patient.declared(rule.probes):
                    seen = rule.check(patient)
            except Exception as error:  # one rule's failure is no reason to miss what others find
                if rule.code not in unwanted:
                    failed[rule.code] = f"{type(error).__name__}: {_first_line(error)}"
                continue
            symptoms = [seen] if isinstance(seen, Symptom) else seen or ()
            measured_on = "" if rule.static or patient.excerpt is None else str(patient.excerpt)
            findings += [_finding(rule, symptom, measured_on) for symptom in symptoms]
        step = "" if broken or patient.recurrent else patient[StateGivenBack].name
    if step:
        patient.assumed.append(f"{step} goes in and comes out of each call: the model was examined as one step")
    if unheard:  # here, since all warnings within the examination are the model's own, and silenced
        warnings.warn(f"hs.diagnose({name}): {unheard}.", HiddenStateWarning, stacklevel=3)
        patient.assumed.append(unheard)
    if not broken and not step and not any(finding.code in _WITHOUT for finding in findings):
        patient.check_recurrent()  # at the end: a forgotten recurrent term is a finding, not a model without recurrence
    explained = {code for rule in RULES for finding in findings if finding.code == rule.code for code in rule.explains}
    failed = {code: why for code, why in failed.items() if code not in explained}
    # What is not wanted is left out last, so that its consequences do not take its place.
    told = [finding for finding in _told(findings) if finding.code not in unwanted]
    return Report(
        told, model=name, assumed=patient.assumed, failed=failed, broken=broken, survey=patient.survey, unheard=unheard
    )


def _finding(rule: Rule, symptom: Symptom, measured_on: str = "") -> Finding:
    """Return a rule's symptom as a finding whose evidence says how much of the input it was measured on."""
    evidence = symptom.evidence
    if measured_on:
        evidence = f"{evidence} {measured_on[0].upper()}{measured_on[1:]}."
    return Finding(
        rule.code,
        symptom.severity,
        symptom.where,
        evidence,
        symptom.cause,
        symptom.advice,
        symptom.numbers,
        symptom.title or rule.title,
    )


def _unheard(patient: Patient, run: Outcome) -> str:
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


def _told(findings: list[Finding]) -> list[Finding]:
    """Leave out what is only the consequence of something as grave that is told."""
    explains = {rule.code: rule.explains for rule in RULES}
    rank: dict[str, int] = {}
    for finding in findings:
        rank[finding.code] = min(RANK[finding.severity], rank.get(finding.code, RANK["note"]))
    waiting = list(rank)

    def hides(cause: str, code: str) -> bool:
        return code in explains[cause] and rank[cause] < RANK["note"] and rank[cause] <= rank[code]

    kept: set[str] = set()
    while waiting:
        # What nothing explains is told; in a circle, what the rules list first.
        free = [c for c in waiting if not any(hides(w, c) for w in waiting if w != c)]
        told = free or waiting[:1]
        kept |= set(told)
        waiting = [code for code in waiting if code not in kept and not any(hides(cause, code) for cause in told)]
    return [finding for finding in findings if finding.code in kept]


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0][:300] if lines else ""
