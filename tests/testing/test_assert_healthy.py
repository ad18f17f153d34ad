"""The doctor as one line of a test."""

import pytest
import torch
from torch import nn

import hiddenstate as hs
from hiddenstate.testing import assert_healthy
from tests.diagnosis.patients.sick import SICK


def test_a_healthy_model_gives_its_report():
    assert assert_healthy(nn.GRU(3, 8, batch_first=True), torch.randn(4, 10, 3)).codes == ()


def test_a_sick_model_fails_with_all_that_is_needed_to_mend_it():
    model, inputs, _ = SICK["batch first forgotten tagger"][1]()
    with pytest.raises(hs.errors.DiagnosisFailed) as failure:
        assert_healthy(model, *inputs)
    text = str(failure.value)
    assert text.startswith("M is not healthy: HS101 samples of a batch influence each other (lstm).")
    assert "evidence" in text
    assert "advice" in text
    assert "ignore=[code]" in text
    assert isinstance(failure.value, AssertionError)
    assert assert_healthy(model, *inputs, ignore=["HS101"]).ok


def test_what_could_not_be_looked_for_is_no_health():
    class Moody(nn.Module):
        def __init__(self):
            super().__init__()
            self.gru = nn.GRU(3, 8, batch_first=True)

        def forward(self, x):
            if self.training:
                raise ValueError("not today")
            return self.gru(x)[0]

    with pytest.raises(hs.errors.DiagnosisFailed, match="HS203 could not be looked for"):
        assert_healthy(Moody(), torch.randn(4, 10, 3))
    with pytest.raises(hs.errors.DiagnosisFailed, match="the model could not be called"):
        assert_healthy(nn.GRU(3, 8, batch_first=True), torch.randn(4, 10, 5))


def test_a_model_without_a_forward_is_called_as_it_is_said():
    class Agent(nn.Module):
        def __init__(self):
            super().__init__()
            self.gru = nn.GRU(3, 8, batch_first=True)

        def act(self, x):
            return self.gru(x)[0]

    x = torch.randn(4, 10, 3)
    assert assert_healthy(Agent(), call=lambda model: model.act(x)).ok
