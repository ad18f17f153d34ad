"""What a sequence starts from."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from hiddenstate.carry import Learned, Noise
from hiddenstate.cells import layers
from hiddenstate.errors import NotRecurrent
from hiddenstate.state import State
from tests.support.cells import CELLS
from tests.support.models import Deep


def test_every_row_starts_from_the_same_learned_state():
    model = Deep()
    learned = Learned(model, std=1.0)
    state = learned(3)
    assert set(state) == {"encoder.lstm.h", "encoder.lstm.c", "gru.h"}
    assert state.batch == 3
    for part in state.values():
        assert torch.equal(part[:, 0], part[:, 2])
    sum(part.sum() for part in state.values()).backward()
    assert all(torch.equal(row.grad, torch.full_like(row, 3.0)) for row in learned.parameters())


@pytest.mark.parametrize("sample", CELLS.values(), ids=CELLS)
def test_it_starts_out_as_the_layers_own_initial_state(sample):
    found = layers(sample.cell())
    model = nn.ModuleList([layer.module for layer in found])
    state = Learned(model)(2)
    for layer in layers(model):
        for part, tensor in layer.initial(2).items():
            assert torch.equal(state[layer.part(part)], tensor)


def test_it_is_an_ordinary_module():
    learned = Learned(Deep(), std=0.1)
    twin = Learned(Deep())
    twin.load_state_dict(learned.state_dict())
    for other in (twin, copy.deepcopy(learned)):
        assert all(torch.equal(part, learned(2)[name]) for name, part in other(2).items())
    assert learned.double()(1)["gru.h"].dtype == torch.float64
    assert "gru.h" in repr(learned)


def test_noise_is_drawn_around_a_state_and_leaves_whole_numbers_alone():
    state = State({"h": torch.full((1000, 3), 5.0), "steps": torch.zeros(1000, dtype=torch.int64)})
    noisy = Noise(0.5).around(state)
    assert abs(float(noisy["h"].mean()) - 5) < 0.1
    assert abs(float(noisy["h"].std()) - 0.5) < 0.05
    assert not noisy["steps"].any()
    assert repr(Noise(0.5)) == "Noise(std=0.5)"


def test_a_model_without_recurrent_layers_is_refused():
    with pytest.raises(NotRecurrent, match=r"Linear has no recurrent layer"):
        Learned(nn.Linear(2, 2))
