"""HS209: ignored in one mode it is this, ignored in both it is HS103."""

import pytest
import torch
from torch import nn

import hiddenstate as hs


class Agent(nn.Module):
    def __init__(self, *ignored):
        super().__init__()
        self.gru, self.pi, self.ignored = nn.GRU(3, 8, batch_first=True), nn.Linear(8, 2), ignored

    def forward(self, obs, h):
        out, h = self.gru(obs, torch.zeros_like(h) if self.training in self.ignored else h)
        return self.pi(out), h


@pytest.mark.parametrize(
    ("ignored", "severity"), [((True,), "warning"), ((False,), "error"), ((True, False), None), ((), None)]
)
def test_each_mode_is_asked(ignored, severity):
    report = hs.diagnose(Agent(*ignored), torch.randn(4, 9, 3), torch.zeros(1, 4, 8))
    found = [each.severity for each in report if each.code == "HS209"]
    assert found == ([severity] if severity else [])
    assert ("HS103" in report.codes) == (len(ignored) == 2)
