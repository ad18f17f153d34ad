"""HS111: an error where it fails, a warning where rows may be sorted by chance, a note where somebody sorts them."""

import pytest
import torch

import hiddenstate as hs
from hiddenstate.diagnosis import first_call
from tests.diagnosis.patients.newcomers import rows_that_come_sorted_or_are_said_to
from tests.diagnosis.patients.noticed import packed_model

TOKENS = torch.randint(1, 20, (4, 9))


@pytest.mark.parametrize(
    ("lengths", "severity"), [([5, 9, 3, 7], "error"), ([9, 9, 9, 9], "warning"), ([9, 7, 5, 3], "warning")]
)
def test_how_grave_it_is_depends_on_what_the_batch_shows(lengths, severity):
    report = hs.diagnose(packed_model(True), TOKENS, torch.tensor(lengths))
    (finding,) = [each for each in report if each.code == "HS111"]
    assert finding.severity == severity
    assert finding.where.startswith("noticed.py:")
    assert bool(report.broken) == (severity == "error")
    assert "HS111" not in hs.diagnose(packed_model(False), TOKENS, torch.tensor(lengths)).codes


def test_five_rows_are_hardly_sorted_by_chance():
    tokens, lengths = torch.randint(1, 20, (5, 9)), torch.tensor([9, 7, 5, 3, 2])
    (finding,) = [each for each in hs.diagnose(packed_model(True), tokens, lengths) if each.code == "HS111"]
    assert finding.severity == "note"
    report = hs.diagnose(packed_model(True), tokens, lengths, thresholds={"by_chance": 1e-6})
    assert [each.severity for each in report if each.code == "HS111"] == ["warning"]


def test_what_is_said_in_so_many_words_is_the_cause():
    model, inputs, _ = rows_that_come_sorted_or_are_said_to(False)
    (finding,) = [each for each in hs.diagnose(model, *inputs) if each.code == "HS111"]
    assert finding.severity == "note"
    assert "packed with enforce_sorted=True" in finding.cause


def test_rows_that_are_not_looked_at_count_as_well(monkeypatch):
    for name, value in {"FREE": -1.0, "SECONDS": 0.0, "SHORT": 5, "STEPS": 5}.items():
        monkeypatch.setattr(first_call, name, value)
    report = hs.diagnose(packed_model(True), torch.randint(1, 20, (5, 9)), torch.tensor([9, 7, 5, 3, 2]))
    (finding,) = [each for each in report if each.code == "HS111"]
    assert "4 of 5 rows" in finding.evidence
    assert finding.severity == "note"
