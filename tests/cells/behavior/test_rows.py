"""Where the rows are: told by what one row's input reaches, never by what its size happens to equal."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from hiddenstate.cells.behavior import find
from hiddenstate.cells.behavior.rows import axis_by_row, axis_by_size, batch_of, other_row, other_size, turned

sizes = st.integers(1, 4)


@st.composite
def calls(draw):
    """Inputs of a call with their rows along one axis, some of them without rows, and that axis."""
    axis, rows = draw(st.integers(0, 1)), draw(st.integers(2, 4))
    shape = [draw(sizes) for _ in range(3)]
    shape[axis] = rows
    tokens = torch.randint(9, shape[:2])
    inputs = ((torch.randn(shape), {"tokens": tokens, "scale": 0.5}), {"table": torch.randn(rows + 3, rows + 3)})
    return inputs, axis, rows


@given(calls(), st.data())
def test_another_row_changes_that_row_of_what_has_rows_and_nothing_else(call, data):
    inputs, axis, rows = call
    row = data.draw(st.integers(0, rows - 1))
    (x, held), kept = other_row(inputs, axis, row)
    assert held["scale"] == 0.5
    assert kept["table"] is inputs[1]["table"]
    for old, new in ((inputs[0][0], x), (inputs[0][1]["tokens"], held["tokens"])):
        assert (old.shape, old.dtype) == (new.shape, new.dtype)
        others = [each for each in range(rows) if each != row]
        assert torch.equal(old.index_select(axis, torch.tensor(others)), new.index_select(axis, torch.tensor(others)))
    assert not torch.equal(x.select(axis, row), inputs[0][0].select(axis, row))
    assert int(held["tokens"].min()) >= 0


@given(calls(), st.data())
def test_the_axis_is_found_along_which_one_row_changed(call, data):
    inputs, axis, rows = call
    row = data.draw(st.integers(0, rows - 1))
    before, after = inputs[0][0], other_row(inputs, axis, row)[0][0]
    found = axis_by_row([(before, after)], rows, row)
    same = [one for one, size in enumerate(before.shape) if size == rows]
    assert found == axis or (found is None and len(same) > 1)
    assert axis_by_row([(before, before)], rows, row) is None
    assert axis_by_row([(before, after), (before, torch.randn_like(before))], rows, row) is None


@given(calls())
def test_the_axis_that_follows_another_number_of_rows_is_found(call):
    inputs, axis, rows = call
    (changed, *_), before, after = other_size(inputs, axis)
    assert (before, batch_of(changed, axis)) == (rows, after)
    assert axis_by_size(inputs[0][0].shape, changed[0].shape, (before, after)) == axis
    assert axis_by_size(inputs[0][0].shape, inputs[0][0].shape, (before, after)) is None
    kept = min(before, after)
    torch.testing.assert_close(changed[0].narrow(axis, 0, kept), inputs[0][0].narrow(axis, 0, kept))


@given(calls())
def test_what_is_turned_twice_is_as_it_was(call):
    inputs, axis, _ = call
    again = turned(turned(inputs, axis), axis)
    torch.testing.assert_close(again, inputs)
    torch.testing.assert_close(turned(inputs, axis)[0][0], inputs[0][0].flip(axis))


def test_an_axis_that_cannot_be_told_from_another_is_none():
    before, after = torch.zeros(3, 3), torch.zeros(3, 3)
    after[1, 1] = 1
    assert axis_by_row([(before, after)], 3, 1) is None
    assert axis_by_size((2, 5), (3, 6), (2, 3)) is None
    assert axis_by_size((2, 5), (4, 5), (2, 3)) is None
    assert axis_by_size((2, 5), (3, 5, 1), (2, 3)) is None


def test_a_call_without_tensors_has_no_rows():
    assert batch_of(((), {"n": 3}), 0) is None
    assert other_row(((), {}), 0) is None
    assert other_size(((), {}), 0) is None
    assert other_size(((torch.zeros(0, 3),), {}), 0) is None


class Laid(nn.Module):
    """An Elman loop whose state has its rows where one wants them."""

    def __init__(self, units: int, axis: int) -> None:
        super().__init__()
        self.mix, self.units, self.axis = nn.Linear(2 + units, units), units, axis

    def forward(self, x):
        h = x.new_zeros(len(x), self.units).movedim(0, self.axis)
        for step in x.unbind(1):
            h = torch.tanh(self.mix(torch.cat([step, h.movedim(self.axis, 0)], 1))).movedim(0, self.axis)
        return h


@given(rows=st.integers(2, 4), units=st.integers(2, 4), axis=st.integers(0, 1), steps=st.integers(3, 5))
def test_a_states_rows_are_where_the_model_has_them_whatever_sizes_are_equal(rows, units, axis, steps):
    (recurrence,) = find(Laid(units, axis), (torch.randn(rows, steps, 2),)).recurrences
    (part,) = recurrence.parts
    assert (part.batch_axis, part.counted) == (axis, False)


class Mixing(Laid):
    """Every row reads the mean over all of them."""

    def forward(self, x):
        h = x.new_zeros(len(x), self.units)
        for step in x.unbind(1):
            h = torch.tanh(self.mix(torch.cat([step, h], 1)))
            h = 0.5 * h + 0.5 * h.mean(0, keepdim=True)
        return h


@pytest.mark.parametrize("units", [3, 5])
def test_rows_that_reach_each_other_are_told_by_calls_with_other_rows(units):
    (recurrence,) = find(Mixing(units, 0), (torch.randn(3, 4, 2),)).recurrences
    assert [part.batch_axis for part in recurrence.parts] == [0]
