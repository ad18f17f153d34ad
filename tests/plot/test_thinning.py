import torch
from hypothesis import given
from hypothesis import strategies as st

from hiddenstate.plot import averaged, picked

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
