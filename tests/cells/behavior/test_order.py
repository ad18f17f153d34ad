"""Whether a state may go on into the next call, and what is said where it may not."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch

import hiddenstate as hs
from hiddenstate.cells.behavior.order import ACROSS, ALL_STEPS, FROM_THE_END, IN_FRONT
from hiddenstate.errors import HiddenStateWarning

from ...support import disorders
from ...support.orders import HEALTHY, SICK, Ordered
from ...support.zoo import CASES
from ...test_found import Backwards, InPart, MixedOn

pytestmark = pytest.mark.filterwarnings("ignore:RNN module weights are not part")
assert disorders  # the sick ones are listed there
TRAINED_ONLY = {"Embedded", "Normed", "TwoCells"}  # what they draw, or take of a piece, is another in every piece


def seen(ordered: Ordered) -> tuple[Any, ...]:
    torch.manual_seed(0)
    found = hs.layers(ordered.make(), *ordered.inputs())
    assert not [each for each in found.seen.unsure if "may be carried was not examined" in each.why]
    return found.seen.cuts


@pytest.mark.parametrize("ordered", HEALTHY.values(), ids=HEALTHY)
def test_nothing_is_said_of_what_may_go_on(ordered):
    assert seen(ordered) == ()


@pytest.mark.parametrize("ordered", SICK.values(), ids=SICK)
def test_what_may_not_go_on_is_named_with_the_reason(ordered):
    (only,) = seen(ordered)
    assert only.module == ordered.path
    assert ordered.reason in only.why
    assert only.line.endswith(tuple("0123456789"))


@torch.no_grad()
def is_whole(ordered: Ordered) -> bool:
    """Whether pieces under a carry are the whole."""
    torch.manual_seed(0)
    model, (x, *_) = ordered.make(), ordered.inputs()
    whole = model(x)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", HiddenStateWarning)
        with hs.Carry(model):
            pieces = torch.cat([model(piece) for piece in x.split(4, ordered.axis)], ordered.axis)
    return pieces.shape == whole.shape and torch.allclose(pieces, whole, atol=1e-6)


CARRIED = {name: one for name, one in HEALTHY.items() if one.carried and name not in TRAINED_ONLY}


@pytest.mark.parametrize("ordered", CARRIED.values(), ids=CARRIED)
def test_what_may_go_on_makes_the_whole(ordered):
    assert is_whole(ordered)


@pytest.mark.parametrize("name", [name for name, one in SICK.items() if one.carried])
def test_what_may_not_go_on_never_makes_the_whole(name):
    assert not is_whole(SICK[name])


def test_an_explanation_tells_where_pieces_cannot_give_the_whole():
    ordered = SICK["flipped"]
    text = hs.layers(ordered.make(), *ordered.inputs()).explain()
    assert "cannot give what the whole gives:\n  rnn, orders.py:" in text


# -- the suite of models in the styles of public code -----------------------------------------------------------------

EXACT = ("leaky_neurons", "python_lstm", "hub_output", "fused_layer_stepped")
NEITHER = ("alternating_lstm", "awd_lstm", "transducer_predictor")
ITS_OWN_START = {"transducer_greedy"}  # the first call of its cell, before the loop, makes the start
BY_ORDER = {FROM_THE_END.text, ALL_STEPS.text, ACROSS.text, IN_FRONT.text}


def of_case(name: str) -> tuple[Any, ...]:
    case = CASES[name]
    args, kwargs = case.inputs()
    torch.manual_seed(0)
    found = hs.layers(case.model(), *args, **kwargs).seen
    assert not [each for each in found.unsure if "may be carried was not examined" in each.why]
    return found.cuts


@pytest.mark.parametrize("name", EXACT)
def test_a_case_that_is_carried_exactly_has_no_reason_not_to_be(name):
    assert of_case(name) == ()


@pytest.mark.parametrize("name", NEITHER)
def test_a_case_whose_pieces_cannot_be_the_whole_has_a_reason(name):
    assert len(of_case(name)) == 1


@pytest.mark.parametrize("name", CASES)
def test_where_the_state_alone_makes_the_whole_nothing_is_wrong_with_the_order(name):
    wrong = [each for each in of_case(name) if each.why in BY_ORDER]
    assert not wrong or name in ITS_OWN_START or not CASES[name].carriable


@pytest.mark.parametrize("make", [Backwards, MixedOn, InPart])
def test_what_was_carried_wrongly_in_silence_has_a_reason(make):
    assert len(hs.layers(make(), torch.randn(2, 6, 3)).seen.cuts) == 1
