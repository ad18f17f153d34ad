"""The models that rolling loops is judged by: each runs, trains and repeats itself. No code of the library is used."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from tests.support.loop_models import FAMILIES, LOOP_MODELS, LoopCase, Outcome, outcome
from tests.support.loop_models.case import EXPECTATIONS
from tests.support.loop_models.comparing import asking_for_gradients, leaves


def every(cases):
    return pytest.mark.parametrize("case", list(cases), ids=lambda case: case.name)


def fresh(case: LoopCase, batch: int, steps: int, *, later: bool = False, input_grads: bool = False) -> Outcome:
    """What a new model makes of new inputs, perhaps after what the user does to it later."""
    model, args = case.model(), case.inputs(batch, steps)
    with case.later(model) if later and case.later else nullcontext():
        return outcome(case, model, asking_for_gradients(args) if input_grads else args)


@every(LOOP_MODELS.values())
@pytest.mark.parametrize(("batch", "steps", "input_grads"), [(3, 7, False), (2, 12, True)])
def test_a_model_runs_trains_and_repeats_itself(case, batch, steps, input_grads):
    asked = input_grads and case.input_grads
    found = fresh(case, batch, steps, input_grads=asked)
    assert found.outputs
    for value in [*found.outputs, *found.grads.values(), *found.input_grads]:
        assert not isinstance(value, Tensor) or value.isfinite().all()
    assert case.grads == any(grad is not None and grad.abs().sum() > 0 for grad in found.grads.values())
    assert found.differences(fresh(case, batch, steps, input_grads=asked)) == []


@every(case for case in LOOP_MODELS.values() if case.doubles)
def test_a_model_that_says_so_runs_in_float64(case):
    args = case.inputs(3, 7)
    wide = pytree.tree_map_only(Tensor, lambda x: x.double() if x.is_floating_point() else x, args)
    plain, exact = leaves(case.run(case.model(), args)), leaves(case.run(case.model().double(), wide))
    for one, other in zip(plain, exact, strict=True):
        if isinstance(one, Tensor) and one.is_floating_point():
            assert other.dtype == torch.float64
            assert torch.allclose(one.double(), other, atol=1e-3, rtol=1e-3)


@every(LOOP_MODELS.values())
def test_a_model_takes_one_row_of_the_fewest_steps_it_claims(case):
    assert leaves(case.run(case.model(), case.inputs(1, case.least)))


@every(case for case in LOOP_MODELS.values() if case.surprise)
def test_a_surprise_has_the_same_shapes_and_another_outcome(case):
    usual, other = case.inputs(3, 7), case.surprise(3, 7)
    assert [x.shape for x in leaves(usual)] == [x.shape for x in leaves(other)]
    assert outcome(case, case.model(), usual).differences(outcome(case, case.model(), other))


@every(case for case in LOOP_MODELS.values() if case.later)
def test_what_is_changed_between_two_calls_changes_the_outcome(case):
    kept, changed = fresh(case, 2, 12), fresh(case, 2, 12, later=True)
    assert kept.differences(changed)
    assert changed.differences(fresh(case, 2, 12, later=True)) == []
    assert kept.differences(fresh(case, 2, 12)) == [], "what was changed was not taken back"


def test_every_case_says_what_is_expected_of_it():
    assert {case.expect for case in LOOP_MODELS.values()} <= set(EXPECTATIONS)
    assert [case.name for case in LOOP_MODELS.values() if case.expect != "roll" and not case.why] == []
    assert len(LOOP_MODELS) == sum(len(family.cases) for family in FAMILIES)
