"""The limits of the rules: each by its name, each adjustable."""

import ast
from dataclasses import fields
from pathlib import Path

import pytest

import hiddenstate as hs
from hiddenstate.diagnosis import Thresholds
from tests.diagnosis.patients.sick import SICK


def test_thresholds_can_be_changed_by_name():
    model, inputs, _ = SICK["weights too small for a long sequence"][1]()
    assert hs.diagnose(model, *inputs, thresholds={"vanishing": 0.0}).ok
    with pytest.raises(hs.errors.BadInput, match=r"no threshold named 'vanishes'.*vanishing"):
        hs.diagnose(model, *inputs, thresholds={"vanishes": 0.0})


def test_without_changes_they_are_the_defaults():
    assert Thresholds.adjusted(None) == Thresholds.adjusted({}) == Thresholds()
    assert Thresholds.adjusted({"leak": 0.5}).leak == 0.5


def test_every_limit_is_one_that_a_rule_or_a_probe_reads():
    folder = Path(hs.__file__).parent / "diagnosis"
    trees = [ast.parse(path.read_text(encoding="utf-8")) for path in folder.rglob("*.py")]
    read = {node.attr for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    assert {field.name for field in fields(Thresholds)} - read == set()
