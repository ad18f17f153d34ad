"""The pages of the findings: their examples are patients, and are examined as printed."""

import re
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence

import hiddenstate as hs
from hiddenstate.diagnosis.catalog import TITLES

PAGES = Path(__file__).parents[2] / "docs" / "findings"
BLOCK = re.compile(r"^## (Sick|Healthy)\n\n```python\n(.*?)^```", re.DOTALL | re.MULTILINE)


def examined(block):
    names = {"torch": torch, "nn": nn, "pack_padded_sequence": pack_padded_sequence}
    exec(compile(block, "page", "exec"), names)
    inputs = names["inputs"] if "inputs" in names else (names["x"],)
    return hs.diagnose(names["model"], *inputs, **names.get("options", {}))


@pytest.mark.parametrize("code", TITLES)
def test_the_sick_example_has_the_finding_and_the_healthy_one_has_none(code):
    text = (PAGES / f"{code}.md").read_text(encoding="utf-8")
    assert text.startswith(f"# {code}: {TITLES[code]}\n")
    examples = dict(BLOCK.findall(text))
    sick, healthy = examined(examples["Sick"]), examined(examples["Healthy"])
    assert code in [finding.code for finding in sick if finding.severity != "note"], sick.text()
    assert healthy.ok, healthy.text()
