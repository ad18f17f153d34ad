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
CLAIMED = {name: case for name, case in RECURRENT.items() if case.carriable is not None}
CARRIABLE = {name: case for name, case in CLAIMED.items() if case.carriable}
KEEPING = {name: case for name, case in RECURRENT.items() if case.own_start == "attribute"}
STEPPING = {
    name: case
    for name, case in RECURRENT.items()
    if any(one.kind & {"cell", "iteration"} and one.module_path for one in case.expect)
}
NOT_RETURNED = {
    ("forward_called", "memory"): "a hook does not hear .forward",
    ("dilated_rnn", "oldest"): "returned two steps ago",
    ("dilated_rnn", "middle"): "returned one step ago",
    ("encoder_decoder", "inp"): "made of what the cell returned",
    ("float_that_becomes_a_voltage", "v"): "kept in an attribute",
}
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
    far = [float((a - b).abs().max()) if a.dtype != torch.bool else float((a ^ b).any()) for a, b in pairs]
    assert all(one == one for one in far), "not a number"
    return max(far)


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


def each(cases: dict[str, Case]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("case", cases.values(), ids=cases)


@each(CASES)
@torch.no_grad()
def test_a_model_gives_the_same_when_made_and_run_again(case):
    first, again = (case.run(case.model(), *case.inputs()) for _ in range(2))
    assert distance(first, again) == 0
    model = case.model()
    case.run(model, *case.inputs())
    assert (distance(case.run(model, *case.inputs()), first) > 0) == case.changes_itself


@each(CASES)
@torch.no_grad()
def test_the_equations_explain_the_output(case):
    args, kwargs = case.inputs()
    output, _ = case.explained(case.model(), args, kwargs)
    assert distance(output, case.run(case.model(), args, kwargs)) <= case.tolerance


@each(CASES)
@torch.no_grad()
def test_the_equations_change_neither_inputs_nor_weights(case):
    args, kwargs = case.inputs()
    model = case.model()
    case.explained(model, args, kwargs)
    assert distance((args, kwargs), case.inputs()) == 0
    if tensors := leaves(model.state_dict()):
        assert distance(tensors, leaves(case.model().state_dict())) == 0


@each(CASES)
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


@each(RECURRENT)
@torch.no_grad()
def test_the_answer_says_how_many_steps_and_where_the_rows_are(case):
    model = case.model()
    modules = dict(model.named_modules())
    args, kwargs = case.inputs()
    answers = case.answers(model, args, kwargs)
    assert len(answers) == len(case.expect) > 0
    for answer in answers:
        assert answer.module_path in modules
        assert answer.batch_axis.keys() == answer.parts.keys() == answer.initial.keys() != set()
        assert answer.derived < answer.parts.keys()
        assert answer.returned.keys() <= answer.parts.keys()
        assert all(len(values) == answer.steps for values in answer.returned.values())
        for name, values in answer.parts.items():
            assert len(values) == answer.steps
            if (axis := answer.batch_axis[name]) is not None:
                assert all(value.shape[axis] == answer.rows for value in values)


@each(STEPPING)
@torch.no_grad()
def test_a_step_that_is_a_module_returned_what_the_answer_says(case):
    """Heard by hooks, without any equations."""
    args, kwargs = case.inputs()
    answers = [one for one in case.answers(case.model(), args, kwargs) if one.module_path]
    model = case.model()
    calls = {one.module_path: [] for one in answers}
    for path in calls:

        def hear(module, args, output, path=path):
            calls[path].append([leaf.clone() for leaf in leaves(output)])

        model.get_submodule(path).register_forward_hook(hear)
    case.run(model, args, kwargs)
    for one in reversed(answers):  # from the end: some modules are called once more, to make the start
        heard = calls[one.module_path][-one.steps :]
        del calls[one.module_path][-one.steps :]
        for part, values in ({**one.parts, **one.returned}).items():
            missed = [
                step
                for step, value in enumerate(values)
                if not any(distance(value, leaf) <= case.tolerance for leaf in (heard[step] if heard else ()))
            ]
            assert bool(missed) == ((case.name, part) in NOT_RETURNED), (part, missed)


@each(RECURRENT)
@torch.no_grad()
def test_each_part_of_the_state_is_in_the_output(case):
    args, kwargs = case.inputs()
    _, runs = case.explained(case.model(), args, kwargs)
    for number, run in enumerate(runs):

        def output_from(state, number=number):
            return case.explained_from([state if k == number else None for k in range(len(runs))])

        state = run.after(-1)
        right = output_from(state)
        assert distance(right, output_from(state)) == 0
        for name, value in state.items():
            changed = distance(output_from({**state, name: spoiled(value)}), right) > 1e-5
            assert changed == (name not in case.idle), name


@each(CLAIMED)
@torch.no_grad()
def test_pieces_equal_the_whole_by_the_equations_where_it_is_claimed_and_nowhere_else(case):
    def second(model, states, args, kwargs):
        return case.oracle(model, *args, start=Starts(states), **kwargs)

    whole, put_together = in_pieces(case, second)
    assert (distance(whole, put_together) <= 2 * case.tolerance) == case.carriable


@each(CARRIABLE)
@torch.no_grad()
def test_pieces_equal_the_whole_by_the_model_itself(case):
    if isinstance(case.resume, str):
        pytest.skip(case.resume)

    def second(model, states, args, kwargs):
        return case.resume(model, states, *args, **kwargs)

    whole, put_together = in_pieces(case, second)
    assert distance(whole, put_together) <= 2 * case.tolerance


@each(KEEPING)
@torch.no_grad()
def test_what_a_model_keeps_is_the_last_state_and_it_goes_on_from_there(case):
    args, kwargs = case.inputs()
    _, runs = case.explained(case.model(), args, kwargs)
    model = case.model()
    case.run(model, args, kwargs)
    kept = case.kept(model)
    last = {name: value for run in runs for name, value in run.after(-1).items() if name in kept}
    assert kept.keys() == last.keys() != set()
    assert distance(kept, last) <= case.tolerance
    expected = case.explained_from([run.after(-1) for run in runs])
    assert distance(case.run(model, args, kwargs), expected) <= case.tolerance


@each({name: case for name, case in DECOYS.items() if case.carriable is not None})
@torch.no_grad()
def test_pieces_of_a_decoy_equal_the_whole_with_nothing_put_in_where_it_is_claimed(case):
    def second(model, states, args, kwargs):
        assert states == []
        return model(*args, **kwargs)

    whole, put_together = in_pieces(case, second)
    assert (distance(whole, put_together) <= 2 * case.tolerance) == case.carriable


def test_the_zoo_is_as_large_as_promised():
    assert len(RECURRENT) >= 55
    assert len(DECOYS) >= 20
    assert sum(len(family.cases) for family in FAMILIES.values()) == len(CASES)


@each(CASES)
def test_each_case_says_what_it_is_and_why(case):
    assert case.style[0].isupper()
    assert case.style.endswith(".")
    assert case.own_start in OWN_STARTS
    assert not (case.carriable and case.time_axis is None)
    assert (case.kept is not None) == (case.own_start == "attribute")
    # No claim without a reason: why a decoy is one, why a state cannot be put in, why pieces are not tried.
    assert case.why if case.is_decoy else case.resume
