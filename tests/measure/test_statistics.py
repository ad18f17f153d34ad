import numpy as np
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


@given(
    seed=st.integers(0, 1000), sizes=st.lists(st.tuples(st.integers(1, 3), st.integers(1, 6)), min_size=1, max_size=5)
)
def test_many_runs_of_unequal_length_are_as_one(seed, sizes):
    generator = torch.Generator().manual_seed(seed)
    size = 10 ** (torch.rand(len(sizes), generator=generator, dtype=torch.float64) * 6 - 3)
    runs = [torch.randn(*s, 3, generator=generator, dtype=torch.float64) * z for s, z in zip(sizes, size, strict=True)]
    whole = torch.cat([run.flatten(0, 1) for run in runs]).unsqueeze(0)
    expected, found = hs.measure.statistics(whole), hs.measure.statistics(iter(runs))
    for name in ("mean", "std", "min", "max"):
        torch.testing.assert_close(getattr(found, name), getattr(expected, name), rtol=1e-9, atol=1e-12)
    assert torch.equal(found.histogram, expected.histogram)
    assert torch.equal(found.edges, expected.edges)
    assert (found.count, found.near_zero) == (expected.count, expected.near_zero)


@given(seed=st.integers(0, 1000), size=st.sampled_from([0.0, 1e-12, 0.5, 1.0, 3e4]))
def test_the_histogram_is_that_of_numpy(seed, size):
    values = torch.randn(2, 9, 3, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * size
    found = hs.measure.statistics(values)
    assert found.histogram.tolist() == np.histogram(values.numpy(), bins=found.edges.numpy())[0].tolist()
    assert found.near_zero == pytest.approx(float((values.abs() < 0.01).double().mean()))


def test_a_recording_of_many_calls_is_measured_run_by_run():
    model = torch.nn.GRU(3, 4, batch_first=True)
    with hs.record(model) as rec:
        for steps in (5, 2, 7):
            model(torch.randn(2, steps, 3))
    entries = torch.cat([run.h.flatten(0, 1) for run in rec.runs("l0")])
    torch.testing.assert_close(hs.measure.statistics(rec.runs("l0")).mean, entries.mean(0))
    assert hs.measure.statistics(rec.runs("l0")).count == 28


def test_the_first_nan_of_many_runs_is_the_first_in_time_and_rows_count_on():
    one, other = torch.zeros(2, 4, 1), torch.zeros(3, 4, 1)
    one[0, 3], other[1, 1] = NAN, INF
    assert hs.measure.statistics([one, other]).first == (3, 1, 0)


def test_arrays_are_states_too():
    values = np.random.default_rng(0).normal(size=(2, 5, 3)).astype("float32")
    torch.testing.assert_close(hs.measure.statistics(values).mean, torch.tensor(values).mean((0, 1)))


def test_the_share_near_zero_is_said_with_its_limit():
    found = hs.measure.statistics(torch.tensor([[[0.0, 0.005, 0.5, -1.0]]]), small=0.01)
    assert found.near_zero == 0.5
    assert "50.0% near zero (below 0.01)" in str(found)
