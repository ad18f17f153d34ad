"""What a stepped layer is fed: steps of an input, or the model's own."""

import random

import pytest
import torch
from torch import nn

from hiddenstate.diagnosis.admission import admit
from hiddenstate.diagnosis.probes.feeding import Feedings
from hiddenstate.diagnosis.thresholds import Thresholds


class Decoder(nn.Module):
    """Steps along a target, and is fed it where `forced(t)` says so."""

    def __init__(self, forced):
        super().__init__()
        self.embed, self.cell, self.head = nn.Embedding(20, 6), nn.GRUCell(6, 6), nn.Linear(6, 20)
        self.forced = forced

    def forward(self, target):
        h, token, outs = torch.zeros(len(target), 6), target[:, 0], []
        for t in range(1, target.size(1)):
            h = self.cell(self.embed(token), h)
            outs.append(self.head(h))
            token = target[:, t] if self.forced(t) else outs[-1].argmax(1)
        return torch.stack(outs, 1)


def feeding(forced):
    torch.manual_seed(0)
    inputs = (torch.randint(20, (4, 9)),)
    patient = admit(Decoder(forced), inputs, lengths=None, axes=(None, None), thresholds=Thresholds())
    with patient.undisturbed():
        patient.look()
        (found,) = patient[Feedings]
    return found


def test_always():
    found = feeding(lambda t: True)
    assert found.always
    assert not found.by_chance


def test_never():
    found = feeding(lambda t: False)
    assert found.told == 0
    assert not found.by_chance


@pytest.mark.parametrize("ratio", [0.2, 0.5, 0.8])
def test_by_chance(ratio):
    found = feeding(lambda t: random.random() < ratio)
    assert found.by_chance
    assert found.told > 0
    assert found.own > 0


def test_a_beginning_that_is_given_is_not_by_chance():
    found = feeding(lambda t: t < 4)
    assert found.told > 0
    assert found.own > 0
    assert not found.by_chance
