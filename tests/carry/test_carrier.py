"""How a state is carried is one value, and whoever hands it over says all that is asked."""

from __future__ import annotations

import pytest

from hiddenstate.carry.carrier import Carrier, CarryOptions
from hiddenstate.cells import Rank


def test_states_are_handed_over_before_anybody_looks_on():
    assert Carrier.rank is Rank.CARRY < Rank.OBSERVE


def test_a_carrier_that_answers_nothing_cannot_be_made():
    with pytest.raises(TypeError, match=r"begin_with.*called_anew.*give_up.*try_call"):
        Carrier()  # type: ignore[abstract]


def test_what_is_not_said_is_strict_and_overrides_nothing():
    assert CarryOptions() == CarryOptions(strict=True, detach=True, override=False, exact=True)
