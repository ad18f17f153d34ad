"""The models that rolling loops is judged by: each runs, trains and repeats itself. No code of the library is used."""

from __future__ import annotations

import dataclasses
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from tests.support.loop_models import FAMILIES, LOOP_MODELS, LoopCase
from tests.support.loop_models.case import EXPECTATIONS

SHAPES = [(3, 7), (2, 12)]

every_case = pytest.mark.parametrize("case", LOOP_MODELS.values(), ids=LOOP_MODELS)


def leaves(value: Any) -> list[Tensor]:
    """All tensors in an output, in order, whatever it is made of."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return [leaf for one in dataclasses.fields(value) for leaf in leaves(getattr(value, one.name))]
    parts = pytree.tree_leaves(value)
    return [leaf for part in parts for leaf in (leaves(part) if dataclasses.is_dataclass(part) else [part])]


def outcome(
    case: LoopCase, batch: int, steps: int, *, later: bool = False
) -> tuple[list[Any], list[Tensor | None], dict[str, Any], Any]:
    """Outputs, gradients of parameters, the state dict afterwards and what else the loop left, of a fresh model."""
    model = case.model()
    with case.later(model) if later and case.later else nullcontext():
        outs = leaves(case.run(model, case.inputs(batch, steps)))
        total = [out.double().square().sum() for out in outs if isinstance(out, Tensor) and out.requires_grad]
        if total:
            torch.stack(total).sum().backward()
    assert bool(total) == case.grads
    grads = [parameter.grad for parameter in model.parameters()]
    return outs, grads, dict(model.state_dict()), case.seen(model)


def same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor):
        return isinstance(other, Tensor) and torch.equal(one, other)
    return one == other


def alike(ones: list[Any], others: list[Any]) -> bool:
    return len(ones) == len(others) and all(same(one, other) for one, other in zip(ones, others, strict=True))


@every_case
@pytest.mark.parametrize(("batch", "steps"), SHAPES)
def test_a_model_runs_trains_and_repeats_itself(case, batch, steps):
    outs, grads, after, seen = outcome(case, batch, steps)
    assert outs
    for out in outs:
        if isinstance(out, Tensor) and out.is_floating_point():
            assert out.isfinite().all()
    assert all(grad.isfinite().all() for grad in grads if grad is not None)
    if case.grads:
        assert any(grad is not None and grad.abs().sum() > 0 for grad in grads)

    again, grads_again, after_again, seen_again = outcome(case, batch, steps)
    assert alike(outs, again)
    assert alike(grads, grads_again)
    assert after.keys() == after_again.keys()
    assert alike([*after.values()], [*after_again.values()])
    assert same(seen, seen_again)


@pytest.mark.parametrize("case", [case for case in LOOP_MODELS.values() if case.doubles], ids=lambda case: case.name)
def test_a_model_that_says_so_runs_in_float64(case):
    args = case.inputs(3, 7)
    model = case.model()
    if next(model.parameters(), None) is None:
        pytest.skip("has no parameters")
    wide = pytree.tree_map_only(Tensor, lambda x: x.double() if x.is_floating_point() else x, args)
    plain, exact = leaves(case.run(case.model(), args)), leaves(case.run(model.double(), wide))
    for one, other in zip(plain, exact, strict=True):
        if isinstance(one, Tensor) and one.is_floating_point():
            assert other.dtype == torch.float64
            assert torch.allclose(one.double(), other, atol=1e-3, rtol=1e-3)


def test_every_case_says_what_is_expected_of_it():
    assert {case.expect for case in LOOP_MODELS.values()} <= set(EXPECTATIONS)
    assert [case.name for case in LOOP_MODELS.values() if case.expect != "roll" and not case.why] == []
    assert len(LOOP_MODELS) == sum(len(family.cases) for family in FAMILIES)


@every_case
def test_a_model_takes_one_row_of_the_fewest_steps_it_claims(case):
    assert leaves(case.run(case.model(), case.inputs(1, case.least)))


@pytest.mark.parametrize("case", [case for case in LOOP_MODELS.values() if case.surprise], ids=lambda case: case.name)
def test_a_surprise_has_the_same_shapes_and_another_outcome(case):
    usual, other = case.inputs(3, 7), case.surprise(3, 7)
    assert [x.shape for x in leaves(usual)] == [x.shape for x in leaves(other)]
    assert not alike(leaves(case.run(case.model(), usual)), leaves(case.run(case.model(), other)))


@pytest.mark.parametrize("case", [case for case in LOOP_MODELS.values() if case.later], ids=lambda case: case.name)
def test_what_is_changed_between_two_calls_changes_the_outcome(case):
    kept, changed = outcome(case, 2, 12), outcome(case, 2, 12, later=True)
    assert not alike([*kept[0], *kept[1], kept[3]], [*changed[0], *changed[1], changed[3]])
