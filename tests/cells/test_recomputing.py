"""Activation checkpointing is seen while it runs a module the first time, and the second."""

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from hiddenstate.cells import may_be_recomputed, recomputing, under_checkpointing


class Asking(nn.Module):
    def __init__(self):
        super().__init__()
        self.answers = []

    def forward(self, x):
        foreseen = not recomputing() and may_be_recomputed(grad_before=True)
        self.answers.append((recomputing(), foreseen, under_checkpointing()))
        return torch.tanh(x)


@pytest.mark.parametrize("reentrant", [False, True])
def test_the_first_run_is_foreseen_and_the_second_is_seen(reentrant):
    model, x = Asking(), torch.ones(2, requires_grad=True)
    model(x).sum().backward()
    checkpoint(model, x, use_reentrant=reentrant).sum().backward()
    assert [answer[:2] for answer in model.answers] == [(False, False), (False, True), (True, False)]
    assert [answer[2] for answer in model.answers[:2]] == [False, True]


def test_without_gradients_before_nothing_is_run_again():
    with torch.no_grad():
        assert not may_be_recomputed(grad_before=False)
        assert not may_be_recomputed(grad_before=True)
