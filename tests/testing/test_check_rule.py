"""`check_rule`: a rule that misses its sick patient, or suspects a healthy one, is told which law it breaks.

That every rule of ours keeps the laws is tested in tests/diagnosis/test_rules.py.
"""

import pytest
import torch
from torch import nn

from hiddenstate.diagnosis import Finding, Report
from hiddenstate.errors import LawBroken
from hiddenstate.testing import check_rule
from hiddenstate.testing.check_rule import LAWS, RuleUnderTest
from hiddenstate.testing.law import enforce


class Tagger(nn.Module):
    def __init__(self, *, batch_first: bool) -> None:
        super().__init__()
        self.lstm, self.head = nn.LSTM(3, 8, batch_first=batch_first), nn.Linear(8, 2)

    def forward(self, x):  # (batch, time, feature)
        return self.head(self.lstm(x)[0])


def sick():
    return Tagger(batch_first=False), (torch.randn(5, 9, 3),)


def healthy():
    return Tagger(batch_first=True), (torch.randn(5, 9, 3),), {"ignore": ["HS501"]}


def test_a_rule_with_its_two_patients_keeps_the_laws():
    check_rule("HS101", sick=sick, healthy=healthy)


def test_a_mistake_that_is_missed_is_told_with_what_was_found_instead():
    with pytest.raises(AssertionError, match=r"HS104 breaks a law: the mistake is found.*Found was HS101"):
        check_rule("HS104", sick=sick, healthy=healthy)


def test_a_healthy_model_that_is_suspected_is_told_with_the_report():
    with pytest.raises(LawBroken, match=r"HS101 breaks a law: a healthy model gets no error.*Tagger: 1 error"):
        check_rule("HS101", sick=sick, healthy=sick)


GOOD = {
    "code": "HS101",
    "severity": "error",
    "where": "lstm",
    "evidence": "0.5 of 1",
    "cause": "rows mix",
    "advice": "nn.LSTM(batch_first=True)",
}

BROKEN = {
    "note": ({"severity": "note"}, {}, "an error or a warning. It is told as a note only"),
    "evidence": ({"evidence": "much"}, {}, "the number that was measured. It says: 'much'"),
    "advice": ({"advice": "think again"}, {}, "a piece of code. It says: 'think again'"),
    "where": ({"where": "", "cause": ""}, {}, "where, what and why. Nothing is said of: where, cause"),
    "failed": ({}, {"healthy": Report([], failed={"HS203": "ValueError"})}, "no check fails.*HS203: ValueError"),
    "changed": ({}, {"changed": "lstm.bias"}, "comes back as it was. Changed: lstm.bias"),
}


@pytest.mark.parametrize(("finding", "trial", "message"), BROKEN.values(), ids=BROKEN)
def test_a_finding_that_breaks_a_law_is_told_with_what_was_seen(finding, trial, message):
    report = Report([Finding(**{**GOOD, **finding})])
    facts = {"code": "HS101", "sick": report, "healthy": Report([]), "changed": "", **trial}
    with pytest.raises(LawBroken, match=message):
        enforce(LAWS, RuleUnderTest(**facts), "HS101")
