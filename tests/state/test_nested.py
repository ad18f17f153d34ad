"""Nested values: what their ends are, and that every nesting is put together again as it was."""

from collections import OrderedDict, namedtuple
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.utils.rnn import pack_sequence

from hiddenstate.state import ends, mapped, numbers, spelled, tensors

Pair = namedtuple("Pair", "h c")


@dataclass
class Memory:
    key: Tensor
    steps: int


leaves = st.integers() | st.text(max_size=3) | st.none() | st.builds(lambda: torch.zeros(2))
nests = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(st.text(max_size=2), inner, max_size=3),
        st.builds(Pair, inner, inner),
        st.builds(Memory, inner, inner),
    ),
)


@given(nests)
def test_a_nesting_whose_ends_are_kept_is_what_it_was(thing):
    again = mapped(thing, lambda _, end: end)
    assert type(again) is type(thing)
    assert [(path, id(end)) for path, end in ends(again) if isinstance(end, Tensor)] == [
        (path, id(end)) for path, end in ends(thing) if isinstance(end, Tensor)
    ]
    assert [path for path, _ in ends(again)] == [path for path, _ in ends(thing)]


@given(nests)
def test_every_end_is_told_with_the_way_to_it(thing):
    seen = []
    mapped(thing, lambda path, end: seen.append((path, id(end))))
    assert seen == [(path, id(end)) for path, end in ends(thing)]


def test_lengths_are_one_end_and_flags_are_not():
    assert list(ends(([3, 1, 2], [True, False]))) == [((0,), [3, 1, 2]), ((1, 0), True), ((1, 1), False)]
    assert numbers((1, 2))
    assert not numbers([])
    assert not numbers([1, 2.0])


def test_tensors_are_found_by_their_paths_and_a_packed_sequence_by_its_data():
    packed = pack_sequence([torch.ones(3, 2), torch.ones(1, 2)])
    h, key = torch.zeros(1), torch.ones(1)
    found = tensors({"out": packed, "state": Pair(h, "c"), "memory": Memory(key, 4)})
    assert list(found) == [("out",), ("state", 0), ("memory", "key")]
    assert found["out",] is packed.data
    assert found["state", 0] is h
    assert found["memory", "key"] is key


def test_a_mapping_keeps_its_kind_where_it_can_be_made_of_a_dict():
    class Odd(dict):
        def __init__(self, first, second):
            super().__init__({1: first, 2: second})

    assert type(mapped(OrderedDict(a=1), lambda _, end: end)) is OrderedDict
    assert mapped(Odd("x", "y"), lambda _, end: end) == {1: "x", 2: "y"}


@pytest.mark.parametrize(("path", "text"), [((), ""), ((1, "logits"), "[1]['logits']")])
def test_a_path_is_spelled_as_one_would_write_it(path, text):
    assert spelled(path) == text
