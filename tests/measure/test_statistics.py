import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import hiddenstate as hs

NAN, INF = float("nan"), float("inf")


@given(seed=st.integers(0, 1000), batch=st.integers(1, 4), time=st.integers(2, 5))
def test_numbers_are_torchs_own_over_the_real_steps(seed, batch, time):
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(batch, time, 3, generator=generator)
    lengths = torch.randint(2, time + 1, (batch,), generator=generator)
    real = torch.cat([row[:length] for row, length in zip(values, lengths, strict=True)])
    for row, length in zip(values, lengths, strict=True):
        row[length:] = NAN
    found = hs.measure.statistics(values, lengths=lengths)
    torch.testing.assert_close(found.mean, real.mean(0))
    torch.testing.assert_close(found.std, real.std(0))
    torch.testing.assert_close(found.min, real.amin(0))
    torch.testing.assert_close(found.max, real.amax(0))
    assert (found.nan, found.inf, found.first, found.count) == (0, 0, None, len(real))
    assert str(found).endswith("all finite")


def test_what_is_not_finite_is_counted_and_left_out():
    values = torch.tensor([[[1.0, INF], [3.0, NAN], [NAN, -INF]]])
    found = hs.measure.statistics(values)
    assert (found.nan, found.inf) == (2, 2)
    assert found.first == (0, 0, 1)
    assert found.mean[0] == 2
    assert found.mean[1].isnan()
    assert found.min[1].isnan()
    assert "2 NaN and 2 Inf, the first at step 0 of row 0 (unit 1)" in str(found)


def test_first_is_first_in_time_not_in_rows():
    values = torch.zeros(3, 5, 2)
    values[0, 4, 0] = NAN
    values[2, 1, 1] = NAN
    assert hs.measure.statistics(values).first == (2, 1, 1)


def test_one_value_has_no_spread():
    assert hs.measure.statistics(torch.ones(1, 1, 1)).std.tolist() == [0]


def test_a_large_offset_does_not_eat_the_spread():
    values = torch.randn(1, 1000, 1, dtype=torch.float32) + 1e4
    found = hs.measure.statistics(values)
    assert float(found.std) == pytest.approx(float(values.double().std()), rel=1e-5)
