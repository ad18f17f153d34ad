"""Operations as they are written down: their operands wherever they are nested, and what they write."""

from __future__ import annotations

from collections import namedtuple
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from hiddenstate.cells.behavior.memory import version_of
from hiddenstate.cells.behavior.operation import Op, in_place, leaves, operands, region_of, replaced, written_by
from hiddenstate.cells.behavior.places import Scope

Pair = namedtuple("Pair", "first second")


@dataclass
class Held:
    """As a cell's state may be: a class of the user's own."""

    h: Tensor
    scale: float = 1.0


tensors = st.integers(0, 9).map(lambda number: torch.full((2,), number))
others = st.none() | st.integers() | st.text(max_size=3)
arguments = st.recursive(
    tensors | others,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.tuples(inner, inner),
        st.builds(Pair, inner, inner),
        st.dictionaries(st.text(max_size=2), inner, max_size=3),
        st.builds(slice, inner, inner),
    ),
    max_leaves=8,
)


@given(arguments)
def test_replacing_every_tensor_by_itself_changes_nothing(value):
    again = replaced(value, lambda tensor: tensor)
    assert type(again) is type(value)
    assert [(place, id(tensor)) for place, tensor in leaves(again)] == [
        (place, id(tensor)) for place, tensor in leaves(value)
    ]


@given(arguments)
def test_what_is_replaced_stands_where_the_tensors_stood(value):
    before, after = list(leaves(value)), list(leaves(replaced(value, lambda tensor: tensor + 10)))
    assert [place for place, _ in before] == [place for place, _ in after]
    assert all(torch.equal(new, old + 10) for (_, old), (_, new) in zip(before, after, strict=True))


@given(st.lists(arguments, max_size=3), st.dictionaries(st.text(max_size=2), tensors | others, max_size=3))
def test_operands_are_the_tensors_among_the_arguments_in_order(args, kwargs):
    expected = [tensor for arg in (*args, *kwargs.values()) for _, tensor in leaves(arg)]
    assert list(map(id, operands(tuple(args), kwargs))) == list(map(id, expected))


def test_tensors_are_found_in_objects_of_the_users_own():
    h = torch.ones(1)
    assert list(leaves({"state": Held(h)})) == [(("state", "h"), h)]
    assert list(leaves([Pair(None, h)])) == [((0, 1), h)]


@pytest.mark.parametrize(
    ("name", "writes"),
    [
        ("add_", True),
        ("__iadd__", True),
        ("__setitem__", True),
        ("add", False),
        ("__add__", False),
        ("__bool__", False),
    ],
)
def test_the_name_tells_what_writes_its_first_operand(name, writes):
    assert in_place(name) is writes


def written(func, name, *args, **kwargs) -> list[Tensor]:
    given_ = operands(args, kwargs)
    versions = [version_of(tensor) for tensor in given_]
    func(*args, **kwargs)
    moved = [tensor for tensor, before in zip(given_, versions, strict=True) if version_of(tensor) != before]
    return written_by(name, (given_, versions), moved, kwargs)


def test_what_an_operation_wrote_is_told_once_for_each_storage():
    a, b = torch.ones(2, 2), torch.ones(2)
    assert written(torch.Tensor.add_, "add_", a, b) == [a]
    assert written(torch.add, "add", a, b) == []
    out = torch.empty(2, 2)
    assert written(torch.add, "add", a, b, out=out)[0] is out
    (target,) = written(torch.Tensor.add_, "add_", a[0], a[1])
    assert torch.equal(target, a[0])
    with torch.inference_mode():  # these do not count: the name tells
        c = torch.ones(2)
        assert written(torch.Tensor.mul_, "mul_", c, c)[0] is c


def setitem(target: Tensor, index) -> Op:
    scope = Scope("call", None, 0, setitem.__code__, 0)
    return Op(torch.Tensor.__setitem__, "__setitem__", ((target, index, 0.0), {}), (scope, 0, -1))


@given(st.data())
def test_a_write_by_index_writes_that_part_and_nothing_else(data):
    target = torch.zeros(4, 5, 3)
    index = tuple(data.draw(st.integers(0, size - 1)) for size in target.shape[: data.draw(st.integers(1, 3))])
    region = region_of(setitem(target, index if len(index) > 1 else index[0]), target)
    region.fill_(1)
    expected = torch.zeros(4, 5, 3)
    expected[index] = 1
    assert torch.equal(target, expected)


@pytest.mark.parametrize("index", [torch.tensor([0, 1]), slice(0, 3), (slice(None), slice(0, 4)), [0, 2], True])
def test_a_write_to_a_large_part_or_by_another_index_counts_as_one_to_the_whole(index):
    target = torch.zeros(4, 5)
    assert region_of(setitem(target, index), target) is target


def test_the_first_rows_are_rows_of_the_whole_and_other_parts_are_parts():
    target = torch.zeros(9, 5)
    assert region_of(setitem(target, slice(0, 1)), target) is target
    assert region_of(setitem(target, slice(None, 1)), target) is target
    assert region_of(setitem(target, slice(1, 2)), target).shape == (1, 5)


def test_autocast_is_remembered_where_it_is_on():
    assert setitem(torch.zeros(1), 0).cast == ()
    with torch.autocast("cpu", torch.bfloat16):
        assert ("cpu", torch.bfloat16) in setitem(torch.zeros(1), 0).cast
