import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hiddenstate.measure.decay import by_lag, half_life, reach


@given(rate=st.floats(0.05, 0.99), peak=st.integers(0, 3))
def test_the_half_life_of_an_exponential_is_exact(rate, peak):
    lags = torch.arange(200, dtype=torch.float64)
    curve = rate ** (lags - peak).abs()  # it may rise before it falls
    assert half_life(curve) == pytest.approx(peak + math.log(2) / -math.log(rate), rel=1e-9)


def test_it_is_exact_beyond_the_end_too():
    assert half_life(0.99 ** torch.arange(10, dtype=torch.float64)) == pytest.approx(math.log(2) / -math.log(0.99))


def test_what_never_fades_has_no_half_life():
    assert half_life(torch.ones(5)) == math.inf
    assert half_life(torch.tensor([1.0, 2.0, 3.0])) == math.inf


def test_a_curve_of_zeros_has_none_either():
    assert math.isnan(half_life(torch.zeros(5)))


def test_a_sudden_end_counts_where_the_line_crosses_the_half():
    assert half_life(torch.tensor([1.0, 1.0, 0.0])) == 1.5


def test_reach_counts_to_the_last_lag_above_the_threshold():
    assert reach(torch.tensor([1.0, 0.5, 0.005, 0.02, 0.001]), 0.01) == 4
    assert reach(torch.tensor([0.0, 0.0, 1.0, 0.0]), 0.01) == 3  # a pure delay
    assert reach(torch.zeros(3), 0.01) == 0


def test_lags_are_counted_from_each_rows_own_end():
    norms = torch.arange(8.0).reshape(2, 4)
    found = by_lag(norms, torch.tensor([3, 1]))
    assert found[0].tolist() == [3, 2, 1, 0]
    assert found[1, :2].tolist() == [5, 4]
    assert found[1, 2:].isnan().all()
