"""The laws of a rule of the doctor: it finds a mistake in a sick model, and leaves a healthy one alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import nn

from ..diagnosis import Finding, Report, diagnose
from .law import Laws, enforce

# The arguments of `hs.diagnose`: model and inputs, and options if there are any.
Case: TypeAlias = "tuple[nn.Module, tuple[Any, ...]] | tuple[nn.Module, tuple[Any, ...], dict[str, Any]]"


@dataclass(frozen=True, slots=True, eq=False)
class RuleUnderTest:
    """A rule, and the reports on its two patients."""

    code: str
    sick: Report
    healthy: Report
    changed: str  # what a diagnosis changed in either model, "" if nothing

    @property
    def finding(self) -> Finding:
        """The rule's finding in the sick model."""
        return next(finding for finding in self.sick if finding.code == self.code)


def check_rule(code: str, *, sick: Callable[[], Case], healthy: Callable[[], Case]) -> None:
    """Raise `LawBroken`, an `AssertionError`, if the rule `code` misses its sick patient or suspects a healthy one.

    >>> class Tagger(nn.Module):
    ...     def __init__(self, **options):
    ...         super().__init__()
    ...         self.lstm, self.head = nn.LSTM(3, 8, **options), nn.Linear(8, 2)
    ...     def forward(self, x):  # (batch, time, feature)
    ...         return self.head(self.lstm(x)[0])
    >>> x = torch.randn(5, 9, 3)
    >>> check_rule("HS101", sick=lambda: (Tagger(), (x,)), healthy=lambda: (Tagger(batch_first=True), (x,)))

    Args:
        code: The rule, such as `HS101`.
        sick: Makes a model with this single mistake, and its inputs: `(model, inputs)` or
            `(model, inputs, options)`, as for `hs.diagnose(model, *inputs, **options)`.
        healthy: Makes the same model without the mistake.
    """
    ill, changed = _examined(sick())
    well, changed_too = _examined(healthy())
    enforce(LAWS, RuleUnderTest(code, ill, well, changed or changed_too), code)


def _examined(case: Case) -> tuple[Report, str]:
    model, inputs, *rest = case
    before, random = {name: value.clone() for name, value in model.state_dict().items()}, torch.get_rng_state()
    modes = [module.training for module in model.modules()]
    report = diagnose(model, *inputs, **(rest[0] if rest else {}))
    changed = [name for name, value in model.state_dict().items() if not _same(before[name], value)]
    if modes != [module.training for module in model.modules()]:
        changed.append("train or eval mode")
    if not torch.equal(random, torch.get_rng_state()):
        changed.append("torch's random stream")
    return report, ", ".join(changed)


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.allclose(one, other, rtol=0, atol=0, equal_nan=True)


def _sick_is_found(trial: RuleUnderTest) -> str | None:
    if trial.code not in trial.sick.codes:
        found = ", ".join(trial.sick.codes) or "nothing"
        return f"Found was {found}. {trial.sick.text()}"
    return None


def _sick_is_grave(trial: RuleUnderTest) -> str | None:
    return "It is told as a note only." if trial.finding.severity == "note" else None


def _evidence_is_measured(trial: RuleUnderTest) -> str | None:
    evidence = trial.finding.evidence
    return None if any(character.isdigit() for character in evidence) else f"It says: {evidence!r}."


def _advice_is_code(trial: RuleUnderTest) -> str | None:
    advice = trial.finding.advice
    return None if any(mark in advice for mark in "(=[.") else f"It says: {advice!r}."


def _place_and_cause_are_told(trial: RuleUnderTest) -> str | None:
    empty = [name for name in ("where", "cause", "title") if not getattr(trial.finding, name)]
    return f"Nothing is said of: {', '.join(empty)}." if empty else None


def _healthy_is_left_alone(trial: RuleUnderTest) -> str | None:
    return None if trial.healthy.ok else trial.healthy.text()


def _nothing_fails(trial: RuleUnderTest) -> str | None:
    failed = {**trial.sick.failed, **trial.healthy.failed}
    return "; ".join(f"{code}: {why}" for code, why in failed.items()) or None


def _model_comes_back(trial: RuleUnderTest) -> str | None:
    return f"Changed: {trial.changed}." if trial.changed else None


LAWS: Laws[RuleUnderTest] = {
    "the mistake is found in a sick model": _sick_is_found,
    "a mistake is an error or a warning": _sick_is_grave,
    "evidence holds the number that was measured": _evidence_is_measured,
    "advice holds a piece of code": _advice_is_code,
    "a finding says where, what and why": _place_and_cause_are_told,
    "a healthy model gets no error and no warning": _healthy_is_left_alone,
    "no check fails on either model": _nothing_fails,
    "the model comes back as it was": _model_comes_back,
}
