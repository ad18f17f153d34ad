"""In which direction a layer is run is seen by what it is fed, however the sequence was turned round."""

import pytest
import torch
from torch import nn

from hiddenstate.diagnosis.probes.steps import Directions
from tests.diagnosis.patients.healthy import HEALTHY, TurnedByHand
from tests.diagnosis.patients.sick import SICK
from tests.support.admitted import admitted


def seen(model, *inputs, **options):
    with admitted(model, *inputs, **options) as patient:
        return patient[Directions]


BY_HAND = ["bidirectional by hand", "bidirectional by hand within lengths", "bidirectional cells"]


@pytest.mark.parametrize("name", BY_HAND)
def test_two_layers_by_hand_run_in_opposite_directions(name):
    model, inputs, options = HEALTHY[name]()
    assert seen(model, *inputs, **options) == {"fwd": "forwards", "bwd": "backwards"}


def test_padding_that_is_turned_to_the_front_hides_nothing():
    model, inputs, options = SICK["padding flipped to the front"][1]()
    assert seen(model, *inputs, **options) == {"model.fwd": "forwards", "model.bwd": "backwards"}


def test_rows_of_any_length_turn_within_it():
    lengths = torch.tensor([3, 8, 8, 1])
    assert seen(TurnedByHand(), torch.randn(4, 8, 3), lengths) == {"fwd": "forwards", "bwd": "backwards"}


def test_where_every_step_follows_all_there_is_no_direction():
    class Centered(nn.Module):
        def __init__(self):
            super().__init__()
            self.gru = nn.GRU(3, 4, batch_first=True)

        def forward(self, x):
            return self.gru(x - x.mean(1, keepdim=True))[0]

    assert seen(Centered(), torch.randn(4, 8, 3)) == {"gru": "unknown"}
    assert seen(Centered(), torch.randn(4, 2, 3)) == {}  # too few to tell
