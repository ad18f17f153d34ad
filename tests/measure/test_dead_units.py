import pytest
import torch

import hiddenstate as hs
from hiddenstate.errors import BadInput


def states():
    values = torch.rand(3, 4, 5) + 0.1
    values[..., 1] = 0.0
    values[..., 3] = 1e-6
    return values


def test_units_at_zero_are_dead():
    found = hs.measure.dead_units(states())
    assert found.units.tolist() == [1, 3]
    assert found.share == pytest.approx(0.4)
    assert str(found) == "2 of 5 units are dead (|h| ≤ 1e-05 at every step): 1, 3"


def test_one_sign_of_life_is_enough():
    values = states()
    values[2, 3, 1] = -0.5
    assert hs.measure.dead_units(values).units.tolist() == [3]


def test_a_unit_that_lives_in_the_padding_only_is_dead():
    values = states()
    values[2, 3] = float("nan")
    values[2, 2, 1] = 7.0
    assert hs.measure.dead_units(values, lengths=torch.tensor([4, 4, 2])).units.tolist() == [1, 3]


def test_a_unit_stuck_elsewhere_is_constant_rather_than_dead():
    values = states()
    values[..., 0] = 0.7
    found = hs.measure.dead_units(values)
    assert found.units.tolist() == [1, 3]
    assert found.constant.tolist() == [0]
    assert "1 more never move" in str(found)


def test_one_single_state_says_nothing_of_constancy():
    assert hs.measure.dead_units(torch.ones(1, 1, 2)).constant.tolist() == []


def test_the_threshold_counts():
    assert hs.measure.dead_units(states(), 1e-7).units.tolist() == [1]


def test_many_dead_units_are_not_all_named():
    assert str(hs.measure.dead_units(torch.zeros(1, 2, 30))).endswith("8, 9, …")


def test_no_rows_are_refused():
    with pytest.raises(BadInput, match="nothing to measure: 0 rows"):
        hs.measure.dead_units(torch.zeros(0, 2, 2))
