"""HS111: an error where it fails, a warning where nothing shows that rows are sorted, a note where they come sorted."""

import pytest
import torch

import hiddenstate as hs
from tests.diagnosis.patients.noticed import packed_model

TOKENS = torch.randint(1, 20, (4, 9))


@pytest.mark.parametrize(
    ("lengths", "severity"), [([5, 9, 3, 7], "error"), ([9, 9, 9, 9], "warning"), ([9, 7, 5, 3], "note")]
)
def test_how_grave_it_is_depends_on_what_the_batch_shows(lengths, severity):
    report = hs.diagnose(packed_model(True), TOKENS, torch.tensor(lengths))
    (finding,) = [each for each in report if each.code == "HS111"]
    assert finding.severity == severity
    assert finding.where.startswith("noticed.py:")
    assert bool(report.broken) == (severity == "error")
    assert "HS111" not in hs.diagnose(packed_model(False), TOKENS, torch.tensor(lengths)).codes
