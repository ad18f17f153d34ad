"""HS210: only a training run shows it, so that `hs.diagnose` says nothing of it."""

import torch
from torch import nn

import hiddenstate as hs
from hiddenstate.diagnosis.rules.hs210_other_resets_in_training import RULE


def test_it_is_told_by_the_monitor_and_never_by_the_doctor():
    assert RULE.code == "HS210"
    assert RULE.monitored
    report = hs.diagnose(nn.GRU(3, 4, batch_first=True), torch.randn(4, 6, 3))
    assert RULE.code not in (*report.codes, *report.failed)
