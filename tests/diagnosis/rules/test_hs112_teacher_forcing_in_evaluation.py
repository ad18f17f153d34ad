"""HS112: where the caller decides it is a note, and the switch that was tried is as it was."""

import random

import pytest
import torch

import hiddenstate as hs
from tests.diagnosis.patients.noticed import Translator, forced_by_a_switch_in_any_mode


class Asked(Translator):
    def forward(self, source, target, teacher_forcing_ratio=1.0):
        return self.decoded(source, target, lambda: random.random() < teacher_forcing_ratio)


@pytest.mark.parametrize("given", [(), (0.5,), (1.0,)])
def test_an_argument_of_forward_is_the_callers(given):
    report = hs.diagnose(Asked(), torch.randint(20, (4, 9)), torch.randint(20, (4, 8)), *given)
    (finding,) = [each for each in report if each.code == "HS112"]
    assert finding.severity == "note"
    assert "teacher_forcing_ratio=0" in finding.advice


def test_without_it_nothing_is_said():
    assert "HS112" not in hs.diagnose(Asked(), torch.randint(20, (4, 9)), torch.randint(20, (4, 8)), 0.0).codes


def test_the_switch_is_put_back():
    model, inputs, _ = forced_by_a_switch_in_any_mode(True)
    assert "HS112" in hs.diagnose(model, *inputs).codes
    assert model.teacher_forcing is True
