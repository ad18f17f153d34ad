"""The data of a picture: one row without its padding, readable labels, and honest thinning."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hiddenstate.errors import BadInput
from hiddenstate.plot import averaged, jumps, one_row, picked, readable
from hiddenstate.recording import Trajectory
from tests.plot.gallery import walk, waves

sizes = st.integers(1, 300)


@given(count=sizes, most=sizes)
def test_what_is_picked_are_true_values_and_not_too_many(count, most):
    thin = picked(torch.arange(count) * 10, most)
    assert 1 <= len(thin.values) <= most
    assert torch.equal(thin.values, thin.index * 10)
    assert bool(thin.note) == (len(thin.values) < count)


@given(count=sizes, most=sizes)
def test_means_are_those_of_their_blocks(count, most):
    values = torch.randn(count, 2)
    thin = averaged(values, most)
    assert 1 <= len(thin.values) <= most
    ends = [*thin.index[1:].tolist(), count]
    slow = [values[start:end].mean(0) for start, end in zip(thin.index.tolist(), ends, strict=True)]
    torch.testing.assert_close(thin.values, torch.stack(slow))
    assert bool(thin.note) == (len(thin.values) < count)


def test_a_nan_in_a_block_still_shows():
    values = torch.zeros(1000)
    values[501] = torch.nan
    assert averaged(values, 10).values.isnan().tolist() == [False] * 5 + [True] + [False] * 4


def test_the_note_says_what_was_left_out():
    assert picked(torch.zeros(5000), 400).note == "every 13th of 5,000 units"
    assert picked(torch.zeros(5000), 250, what="rows").note == "every 20th of 5,000 rows"
    assert picked(torch.zeros(10), 5).note == "every 2nd of 10 units"
    assert picked(torch.zeros(21), 1).note == "every 21st of 21 units"
    assert averaged(torch.zeros(5000), 800).note == "means of 7 of 5,000 steps"


def test_a_row_counted_from_the_end_is_taken():
    h = waves(rows=3)
    torch.testing.assert_close(one_row(h, row=-1), h[2])


def test_readable_keeps_what_is_readable():
    assert readable(["the", "a b", "c\td", ""], 4) == ["the", "a b", "c⇥d", "∅"]


@given(length=st.integers(0, 9), row=st.integers(-3, 2))
def test_a_row_ends_where_its_padding_begins(length, row):
    h = waves(rows=3, steps=9)
    assert torch.equal(one_row(Trajectory(h, torch.full((3,), length)), row=row), h[row, :length])


def test_a_part_or_gate_is_taken_by_its_name_and_one_sequence_needs_no_batch_axis():
    assert torch.equal(one_row(walk(), part="c"), 2 * waves()[0])
    assert torch.equal(one_row(walk(), part="forget"), 1 - waves()[0].abs() / 2)
    assert torch.equal(one_row(waves()[0]), waves()[0])


def test_what_is_taken_is_a_copy_without_a_graph():
    h = waves().half().requires_grad_()
    taken = one_row(h)
    before = taken.clone()
    with torch.no_grad():
        h.zero_()
    assert torch.equal(taken, before)
    assert (taken.dtype, taken.requires_grad) == (torch.float32, False)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: one_row(torch.zeros(3)),
            r"or \(time, unit\), but this is a tensor of shape \(3,\)",
        ),
        (lambda: one_row({}), "but this is dict. A recording has one trajectory for each track"),
        (lambda: one_row(waves(), row=1), "row 1 was asked for, but the trajectory has 1 rows"),
        (lambda: readable(["a"], 2, what="labels"), "there are 1 labels, but 2 steps: one for each step is needed"),
    ],
)
def test_what_has_no_such_row_or_too_few_labels_is_refused(call, message):
    with pytest.raises(BadInput, match=message):
        call()


@given(steps=st.integers(31, 200), rows=st.integers(1, 3))
def test_states_without_memory_jump_and_those_that_drift_do_not(steps, rows):
    torch.manual_seed(steps)
    assert jumps([torch.randn(steps, 4) for _ in range(rows)])
    assert not jumps([torch.linspace(0, 3, steps).unsqueeze(1).sin() for _ in range(rows)])


def test_of_a_few_steps_lines_are_always_drawn():
    assert not jumps([torch.randn(30, 4)])
