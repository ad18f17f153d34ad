"""How fast a gradient fades, also where it fades below what a float can hold."""

import pytest
import torch
from torch import nn

import hiddenstate as hs
from hiddenstate.diagnosis.probes.slopes import per_step


@pytest.mark.parametrize("factor", [0.05, 0.5, 0.99, 1.5])
def test_the_factor_of_one_step_is_found(factor):
    sizes = factor ** torch.arange(19, -1, -1, dtype=torch.float64)
    assert per_step(sizes) == pytest.approx(factor)


def test_what_underflowed_does_not_count():
    sizes = 0.5 ** torch.arange(199, -1, -1, dtype=torch.float64)
    sizes[sizes < 1e-40] = 0
    assert per_step(sizes) == pytest.approx(0.5)


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_a_fresh_layer_over_many_steps_is_no_alarm(kind):
    class Last(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = kind(5, 16, batch_first=True)
            self.head = nn.Linear(16, 3)

        def forward(self, x):
            return self.head(self.layer(x)[0][:, -1])

    report = hs.diagnose(Last(), torch.randn(4, 200, 5))
    assert report.ok
    assert [finding.code for finding in report] in ([], ["HS501"])
