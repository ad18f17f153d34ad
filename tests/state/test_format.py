"""Rows as files of their own: the same bytes as one by one, and the same rows again."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hiddenstate.errors import StateFileError, StateMismatch
from hiddenstate.state import Format, State, from_bytes, to_bytes
from tests.support.strategies import states

SOME = states(batch=st.integers(1, 4))


def lstm(rows: int = 3, units: int = 4) -> State:
    return State({"h": torch.randn(1, rows, units), "c": torch.randn(1, rows, units)}, 1)


@given(state=SOME)
def test_each_row_is_written_as_it_would_be_alone(state):
    each = Format(state)
    for row, data in enumerate(each.rows(state)):
        assert each.seal(data) == to_bytes(state.select([row]))


@given(state=SOME)
def test_what_is_sealed_comes_back(state):
    each = Format(state)
    again = each.state([each.unseal(each.seal(row)) for row in each.rows(state)])
    assert dict(again.batch_axis) == dict(state.batch_axis)
    for name, part in state.items():
        assert again[name].dtype == part.dtype
        assert torch.equal(again[name], part)


def test_a_format_made_of_one_row_serves_any_rows():
    each, state = Format(lstm(1)), lstm(5)
    assert each.rows(state) == Format(state).rows(state)
    assert each.fits(state)
    assert each.nbytes == 2 * 4 * 4


def test_a_sealed_row_is_a_file_like_any_other():
    state = lstm()
    each = Format(state)
    assert torch.equal(from_bytes(each.seal(each.rows(state)[1]))["h"], state["h"][:, 1:2])


def test_a_file_written_with_its_parts_in_another_order_is_read_too():
    state = lstm(1)
    turned = State({"c": state["c"], "h": state["h"]}, 1)
    each = Format(state)
    assert each.unseal(to_bytes(turned)) == each.rows(state)[0]


@given(at=st.integers(0, 10_000), flip=st.integers(1, 255))
def test_a_damaged_row_is_refused(at, flip):
    each = Format(lstm())
    data = bytearray(each.seal(each.rows(lstm())[0]))
    data[-1 - at % each.nbytes] ^= flip
    with pytest.raises(StateFileError, match="session 7 is damaged"):
        each.unseal(bytes(data), source="session 7")


@given(cut=st.integers(0, 400))
def test_a_file_cut_short_is_refused(cut):
    each = Format(lstm())
    data = each.seal(each.rows(lstm())[0])
    with pytest.raises(StateFileError, match="session 7"):
        each.unseal(data[: min(cut, len(data) - 1)], source="session 7")


@pytest.mark.parametrize(
    "other", [lstm(1, 5), lstm(2), State({"h": torch.zeros(1, 1, 4)}, 1), lstm(1).to(torch.float64)]
)
def test_a_state_of_another_kind_is_refused(other):
    each = Format(lstm())
    with pytest.raises(StateMismatch, match=r"session 7 holds State\(.*not a state of this kind: Format\(h \(1, 4\) f"):
        each.unseal(to_bytes(other), source="session 7")
