"""The zoo checks itself: each model is what its own equations say, and each claim about its state is true.

No code of the library is used here: these are the cases that it is judged by.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence
from torch.utils import _pytree as pytree

from .support.zoo import CASES, FAMILIES, Case
from .support.zoo.case import OWN_STARTS, Starts

RECURRENT = {name: case for name, case in CASES.items() if not case.is_decoy}
DECOYS = {name: case for name, case in CASES.items() if case.is_decoy}
CUT = 4


def leaves(value: Any) -> list[Tensor]:
    """All tensors in an output, in order, whatever it is made of."""
    if dataclasses.is_dataclass(value):
        return [leaf for one in dataclasses.fields(value) for leaf in leaves(getattr(value, one.name))]
    if isinstance(value, dict):
        return [leaf for key in sorted(value, key=str) for leaf in leaves(value[key])]
    if isinstance(value, PackedSequence):
        return [value.data, value.batch_sizes]
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor)]


def distance(one: Any, other: Any) -> float:
    """How far apart two outputs are; infinitely, where their shapes differ."""
    pairs = list(zip(leaves(one), leaves(other), strict=True))
    assert pairs
    if any(a.shape != b.shape for a, b in pairs):
        return float("inf")
    return max(float((a - b).abs().max()) if a.dtype != torch.bool else float((a ^ b).any()) for a, b in pairs)


def joined(how: Any, first: Any, second: Any) -> Any:
    """Outputs of two pieces as one output: along an axis, or the second's alone."""
    if how == "last":
        return second
    if isinstance(how, dict):
        return {key: joined(how[key], first[key], second[key]) for key in how}
    if isinstance(how, tuple):
        return tuple(joined(one, a, b) for one, a, b in zip(how, first, second, strict=True))
    return [torch.cat(pair, dim=how) for pair in zip(leaves(first), leaves(second), strict=True)]


def spoiled(value: Tensor) -> Tensor:
    """A part that is not what it was."""
    if value.dtype == torch.bool:
        return ~value
    if value.is_floating_point() or value.is_complex():
        return value + 0.3 * torch.linspace(0.5, 1, value.numel()).view(value.shape)
    mirrored = value.max() + value.min() - value
    return mirrored if not torch.equal(mirrored, value) else value + 1


def in_pieces(case: Case, second: Any) -> tuple[Any, Any]:
    """The whole by the model's equations, and the same in two pieces, of which `second` runs the second."""
    args, kwargs = case.inputs()
    whole, _ = case.explained(case.model(), args, kwargs)
    (head_args, head_kwargs), (tail_args, tail_kwargs) = case.pieces(args, kwargs, CUT)
    starts, model = Starts(), case.model()
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)  # the second piece goes on with the random draws of the first
        head = case.oracle(model, *head_args, start=starts, **head_kwargs)
        tail = second(model, [run.after(-1) for run in starts.runs], tail_args, tail_kwargs)
    return whole, joined(case.join, head, tail)


@pytest.fixture(params=CASES.values(), ids=CASES)
def case(request):
    return request.param


@pytest.fixture(params=RECURRENT.values(), ids=RECURRENT)
def recurrent(request):
    return request.param


@pytest.fixture(params=DECOYS.values(), ids=DECOYS)
def decoy(request):
    return request.param


@torch.no_grad()
def test_a_model_gives_the_same_when_made_and_run_again(case):
    first, again = (case.run(case.model(), *case.inputs()) for _ in range(2))
    assert distance(first, again) == 0
    model = case.model()
    case.run(model, *case.inputs())
    assert (distance(case.run(model, *case.inputs()), first) > 0) == case.changes_itself


@torch.no_grad()
def test_the_equations_explain_the_output(case):
    args, kwargs = case.inputs()
    output, _ = case.explained(case.model(), args, kwargs)
    assert distance(output, case.run(case.model(), args, kwargs)) <= case.tolerance


@torch.no_grad()
def test_the_equations_change_neither_inputs_nor_weights(case):
    args, kwargs = case.inputs()
    model = case.model()
    case.explained(model, args, kwargs)
    assert distance((args, kwargs), case.inputs()) == 0
    if tensors := leaves(model.state_dict()):
        assert distance(tensors, leaves(case.model().state_dict())) == 0


def test_a_model_can_be_trained_as_the_equations_say(case):
    """The gradients of all weights agree, where there are any: the states are not only right in value."""
    args, kwargs = case.inputs()
    found = []
    for run in (case.run, lambda *call: case.explained(*call)[0]):
        model = case.model()
        outputs = [leaf for leaf in leaves(run(model, args, kwargs)) if leaf.requires_grad]
        if outputs:
            torch.stack([leaf.square().mean() for leaf in outputs]).sum().backward()
        found.append({name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None})
    ours, theirs = found
    assert theirs.keys() <= ours.keys()
    for name, gradient in ours.items():
        size = gradient.abs().max()
        torch.testing.assert_close(
            theirs.get(name, torch.zeros_like(gradient)), gradient, rtol=1e-3, atol=float(1e-4 * size + 1e-6)
        )


@torch.no_grad()
def test_the_answer_says_how_many_steps_and_where_the_rows_are(recurrent):
    model = recurrent.model()
    modules = dict(model.named_modules())
    args, kwargs = recurrent.inputs()
    answers = recurrent.answers(model, args, kwargs)
    assert len(answers) == len(recurrent.expect) > 0
    for answer in answers:
        assert answer.module_path in modules
        assert answer.batch_axis.keys() == answer.parts.keys() == answer.initial.keys() != set()
        for name, values in answer.parts.items():
            assert len(values) == answer.steps
            if (axis := answer.batch_axis[name]) is not None:
                assert all(value.shape[axis] == answer.rows for value in values)


@torch.no_grad()
def test_each_part_of_the_state_is_in_the_output(recurrent):
    args, kwargs = recurrent.inputs()
    _, runs = recurrent.explained(recurrent.model(), args, kwargs)
    for number, run in enumerate(runs):

        def output_from(state, number=number):
            return recurrent.explained_from([state if k == number else None for k in range(len(runs))])

        state = run.after(-1)
        right = output_from(state)
        assert distance(right, output_from(state)) == 0
        for name, value in state.items():
            changed = distance(output_from({**state, name: spoiled(value)}), right) > 1e-5
            assert changed == (name not in recurrent.idle), name


@torch.no_grad()
def test_pieces_equal_the_whole_by_the_equations_where_it_is_claimed(recurrent):
    if recurrent.time_axis is None:
        assert recurrent.carriable is not True
        return

    def second(model, states, args, kwargs):
        return recurrent.oracle(model, *args, start=Starts(states), **kwargs)

    if recurrent.carriable is not None:
        whole, put_together = in_pieces(recurrent, second)
        assert (distance(whole, put_together) <= 2 * recurrent.tolerance) == recurrent.carriable


@torch.no_grad()
def test_pieces_equal_the_whole_by_the_model_itself(recurrent):
    if isinstance(recurrent.resume, str):
        assert (recurrent.resume != "") == (recurrent.carriable is True), "either a way to put a state in, or why not"
        pytest.skip(recurrent.resume or "cannot be carried, which the equations show")

    def second(model, states, args, kwargs):
        return recurrent.resume(model, states, *args, **kwargs)

    whole, put_together = in_pieces(recurrent, second)
    assert distance(whole, put_together) <= 2 * recurrent.tolerance


@torch.no_grad()
def test_what_a_model_keeps_is_the_last_state(recurrent):
    if recurrent.kept is None:
        assert recurrent.own_start != "attribute"
        return
    args, kwargs = recurrent.inputs()
    _, runs = recurrent.explained(recurrent.model(), args, kwargs)
    model = recurrent.model()
    recurrent.run(model, args, kwargs)
    kept = recurrent.kept(model)
    last = {name: value for run in runs for name, value in run.after(-1).items() if name in kept}
    assert kept.keys() == last.keys() != set()
    assert distance(kept, last) <= recurrent.tolerance


@torch.no_grad()
def test_a_model_with_a_state_of_its_own_goes_on_where_it_ended(recurrent):
    if recurrent.own_start != "attribute":
        return
    args, kwargs = recurrent.inputs()
    _, runs = recurrent.explained(recurrent.model(), args, kwargs)
    model = recurrent.model()
    recurrent.run(model, args, kwargs)
    expected = recurrent.explained_from([run.after(-1) for run in runs])
    assert distance(recurrent.run(model, args, kwargs), expected) <= recurrent.tolerance


@torch.no_grad()
def test_a_decoy_has_no_state_to_put_in(decoy):
    """What `carriable` says of a decoy: whether pieces equal the whole with nothing put in at all."""
    assert decoy.why
    if decoy.carriable is None:
        return

    def second(model, states, args, kwargs):
        assert states == []
        return model(*args, **kwargs)

    whole, put_together = in_pieces(decoy, second)
    assert (distance(whole, put_together) <= 2 * decoy.tolerance) == decoy.carriable


def test_the_zoo_is_as_large_as_promised():
    assert len(RECURRENT) >= 55
    assert len(DECOYS) >= 20
    assert sum(len(family.cases) for family in FAMILIES.values()) == len(CASES)


def test_each_case_says_what_it_is(case):
    assert case.style[0].isupper()
    assert case.style.endswith(".")
    assert case.own_start in OWN_STARTS
    assert not (case.carriable and case.time_axis is None)
