"""A native state to named parts, and back: the same nesting, the same tensors."""

import collections

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hiddenstate.cells import flatten, rebuild
from hiddenstate.errors import StateMismatch

LEAF = st.builds(lambda: torch.zeros(2, 3))
KEYS = st.text("abc", min_size=1, max_size=2)
NATIVE = st.recursive(
    LEAF,
    lambda inner: st.one_of(
        st.lists(inner, min_size=1, max_size=3),
        st.lists(inner, min_size=1, max_size=3).map(tuple),
        st.dictionaries(KEYS, inner, min_size=1, max_size=3),
    ),
    max_leaves=6,
)


def same(one, other):
    if isinstance(one, torch.Tensor):
        return one is other
    if isinstance(one, dict):
        return type(one) is type(other) and one.keys() == other.keys() and all(same(one[k], other[k]) for k in one)
    return type(one) is type(other) and len(one) == len(other) and all(map(same, one, other))


@given(native=NATIVE)
def test_rebuilding_gives_back_the_very_same(native):
    parts, form = flatten(native)
    assert same(native, rebuild(form, parts))


def test_parts_are_named_by_place_or_key():
    a = torch.zeros(1)
    assert list(flatten(a)[0]) == ["h"]
    assert list(flatten((a, a))[0]) == ["h", "c"]
    assert list(flatten((a, a, a))[0]) == ["0", "1", "2"]
    assert list(flatten(((a, a), a))[0]) == ["0.0", "0.1", "1"]
    assert list(flatten({"x": a, "y": (a, a)})[0]) == ["x", "y.0", "y.1"]


def test_named_tuples_stay_named_tuples():
    kind = collections.namedtuple("kind", "key value gain")
    native = kind(*(torch.zeros(1) for _ in range(3)))
    parts, form = flatten(native)
    assert isinstance(rebuild(form, parts), kind)


def test_what_is_no_state_is_refused():
    with pytest.raises(StateMismatch, match=r"part '1' of the state is int, but a state is a tensor"):
        flatten((torch.zeros(1), 3))
    with pytest.raises(StateMismatch, match=r"the state is NoneType"):
        flatten(None)
    with pytest.raises(StateMismatch, match=r"needs at least one tensor, but this is \(\)"):
        flatten(())
    with pytest.raises(StateMismatch, match=r"both be named 'a\.b': use keys without dots"):
        flatten({"a": {"b": torch.zeros(1)}, "a.b": torch.zeros(1)})
