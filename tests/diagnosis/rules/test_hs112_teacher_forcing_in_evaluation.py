"""HS112: where the caller has decided it is a note, and the switch that was tried is as it was."""

import random

import pytest
import torch
from torch import nn

import hiddenstate as hs
from tests.diagnosis.patients.noticed import Translator, forced_by_a_switch_in_any_mode


class Asked(Translator):
    def forward(self, source, target, teacher_forcing_ratio=1.0):
        return self.decoded(source, target, lambda: random.random() < teacher_forcing_ratio)


@pytest.mark.parametrize("given", [(), (0.5,), (1.0,)])
def test_an_argument_of_forward_is_the_callers(given):
    report = hs.diagnose(Asked(), torch.randint(20, (4, 9)), torch.randint(20, (4, 8)), *given)
    (finding,) = [each for each in report if each.code == "HS112"]
    assert finding.severity == ("note" if given else "warning")
    assert "teacher_forcing_ratio=0" in finding.advice


def test_without_it_nothing_is_said():
    assert "HS112" not in hs.diagnose(Asked(), torch.randint(20, (4, 9)), torch.randint(20, (4, 8)), 0.0).codes


def test_the_switch_is_put_back():
    model, inputs, _ = forced_by_a_switch_in_any_mode(True)
    assert "HS112" in hs.diagnose(model, *inputs).codes
    assert model.teacher_forcing is True


class Forecast(nn.Module):
    """Numbers in place of tokens, begun with the last of what was observed, and two cells on top of each other."""

    def __init__(self):
        super().__init__()
        self.encoder, self.lower = nn.GRU(3, 8, batch_first=True), nn.GRUCell(1, 8)
        self.upper, self.head = nn.GRUCell(8, 8), nn.Linear(8, 1)

    def forward(self, observed, target, teacher_forcing=True):
        lower = upper = self.encoder(observed)[1][0]
        fed, outs = observed[:, -1, :1], []
        for t in range(target.size(1)):
            lower = self.lower(fed, lower)
            upper = self.upper(lower, upper)
            outs.append(self.head(upper))
            fed = target[:, t] if teacher_forcing else outs[-1]
        return torch.stack(outs, 1)


def test_what_a_decoder_begins_with_is_no_step_of_its_own():
    inputs = torch.randn(4, 7, 3), torch.randn(4, 6, 1)
    (finding,) = [each for each in hs.diagnose(Forecast(), *inputs) if each.code == "HS112"]
    assert "4 of 4 steps after the first are fed from target" in finding.evidence
    assert "HS112" not in hs.diagnose(Forecast(), *inputs, False).codes
