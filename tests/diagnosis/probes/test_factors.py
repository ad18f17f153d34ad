"""By what states are multiplied: what is read from a trace is the factor that the step is written with."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from hiddenstate.diagnosis.probes.factors import NeverUpdated, StateFactors
from tests.diagnosis.patients.newcomers import Loop, both, part_of_a_loop_that_is_never_handed_on
from tests.support.admitted import admitted

X = torch.randn(3, 5, 3)


def factors_of(step, **layers):
    with admitted(Loop(step, **{"maps": nn.Linear(11, 8), **layers}), X) as patient:
        return patient[StateFactors]


WAYS = {
    "a product and a sum": lambda a, h, new: a * h + new,
    "a sum of three": lambda a, h, new: new + h * a + new,
    "a step of an equation": lambda a, h, new: h + (a - 1) * h + new,
    "what is taken away": lambda a, h, new: h - (1 - a) * (h - new),
    "a difference the other way round": lambda a, h, new: -(new - a * h),
    "a quotient": lambda a, h, new: (h + new) / (1 / a),
    "lerp": lambda a, h, new: torch.lerp(new, h, a),
    "a copy on the way": lambda a, h, new: (a * h.clone()).contiguous() + new,
}


@settings(max_examples=5, deadline=None)
@given(st.floats(0.1, 0.9))
@pytest.mark.parametrize("way", WAYS)
def test_however_it_is_written_the_factor_is_the_same(way, factor):
    def step(self, x, h):
        return WAYS[way](factor, h, torch.tanh(self.maps(both(x, h))))

    told = {(round(each.low, 4), round(each.high, 4), each.varies) for each in factors_of(step)}
    (found,) = told - {(1.0, 1.0, False)}
    assert found == (pytest.approx(factor, abs=1e-3), pytest.approx(factor, abs=1e-3), False)


def test_a_gate_varies_and_is_known_by_what_made_it():
    def step(self, x, h):
        z = torch.sigmoid(self.maps(both(x, h)))
        return (1 - z) * h + z * torch.tanh(x.sum(1, keepdim=True))

    found = factors_of(step)[-1]
    assert found.varies
    assert 0 <= found.low < found.high <= 1
    assert found.made_by == {"sigmoid"}
    assert found.complement


def test_what_nothing_squashes_is_driven_by_larger_inputs():
    found = factors_of(lambda self, x, h: self.maps(both(x, h)) * h + x.sum(1, keepdim=True))
    assert {each.made_by for each in found} == {frozenset({"linear"})}
    assert found[-1].high > 10 * found[0].high


NOT_STRAIGHT = {
    "squashed": lambda h, new: torch.tanh(1.5 * h + new),
    "a matrix": lambda h, new: h @ torch.eye(8) * 1.5 + new,
    "a square": lambda h, new: h * h + new,
    "entries that change places": lambda h, new: h[:, torch.arange(7, -1, -1)] * 1.5 + new,
    "in a denominator": lambda h, new: new / (2 + h) + new,
}


@pytest.mark.parametrize("way", NOT_STRAIGHT)
def test_what_is_no_straight_way_has_no_factor(way):
    assert factors_of(lambda self, x, h: NOT_STRAIGHT[way](h, self.maps(both(x, h)))) == ()


def test_a_part_that_is_never_handed_on_is_found_at_its_line():
    model, inputs, _ = part_of_a_loop_that_is_never_handed_on(True)
    with admitted(model, *inputs) as patient:
        found = patient[NeverUpdated]
    assert found.line.startswith("newcomers.py:")
    assert found.steps == 9


def test_a_rest_state_that_a_gate_mixes_in_is_none():
    rest = nn.Parameter(torch.randn(8))

    def step(self, x, h):
        keep = torch.sigmoid(self.maps(both(x, h)))
        return keep * h + (1 - keep) * rest.expand(len(x), 8)

    with admitted(Loop(step, maps=nn.Linear(11, 8)), X) as patient:
        assert patient[NeverUpdated].line == ""
