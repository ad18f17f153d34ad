"""Curves over lags, against what is known of exponentials."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hiddenstate.measure.lag_curve import band, by_lag, half_life, reach


@given(rate=st.floats(0.3, 0.98), lags=st.integers(3, 60))
def test_an_exponential_has_its_own_half_life_and_reach(rate, lags):
    curve = rate ** torch.arange(lags, dtype=torch.float64)
    assert half_life(curve) == pytest.approx(math.log(0.5) / math.log(rate), rel=1e-6)
    assert reach(curve, 0.01) == int((curve >= 0.01).sum())


def test_what_never_falls_has_no_half_life_and_nothing_has_none_at_all():
    assert half_life(torch.ones(5)) == math.inf
    assert math.isnan(half_life(torch.zeros(5)))
    assert reach(torch.zeros(5), 0.01) == 0


@given(rows=st.integers(1, 6), lags=st.integers(1, 8))
def test_the_band_is_about_the_mean_and_never_below_zero(rows, lags):
    values = torch.rand(rows, lags, dtype=torch.float64)
    low, high = band(values)
    mean = values.mean(0)
    assert bool(((low >= 0) & (low <= mean + 1e-12) & (mean <= high + 1e-12)).all())


def test_lags_are_counted_from_each_rows_end():
    norms = torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])
    found = by_lag(norms, torch.tensor([2, 1]))
    assert found[0].tolist() == [3.0, 2.0, 1.0]
    assert found[1, :2].tolist() == [5.0, 4.0]
    assert math.isnan(found[1, 2])
