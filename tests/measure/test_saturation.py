import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import hiddenstate as hs
from hiddenstate.errors import BadInput
from hiddenstate.recording import Trajectory

NAN = float("nan")


def slow_share(values, lengths, saturated):
    """The obvious way: look at one number after the other."""
    hits = [
        saturated(float(values[row, step, unit]))
        for row in range(values.shape[0])
        for step in range(int(lengths[row]))
        for unit in range(values.shape[2])
    ]
    return sum(hits) / len(hits)


@given(seed=st.integers(0, 1000), threshold=st.floats(0.1, 1.0), batch=st.integers(1, 4), time=st.integers(1, 5))
def test_shares_are_those_of_counting_one_by_one(seed, threshold, batch, time):
    generator = torch.Generator().manual_seed(seed)
    values = torch.rand(batch, time, 3, generator=generator, dtype=torch.float64) * 2 - 1
    lengths = torch.randint(1, time + 1, (batch,), generator=generator)
    padded = values.masked_fill(torch.arange(time)[None, :, None] >= lengths[:, None, None], NAN)
    found = hs.measure.saturation(padded, threshold, lengths=lengths)
    assert found.share == pytest.approx(slow_share(values, lengths, lambda v: abs(v) >= threshold))
    weights = lengths.new_tensor([(lengths > step).sum() for step in range(time)])
    assert float((found.steps.nan_to_num() * weights).sum() / weights.sum()) == pytest.approx(found.share)
    assert float(found.units.mean()) == pytest.approx(found.share)


def test_rates_of_units_and_steps():
    values = torch.zeros(2, 3, 2)
    values[:, :, 1] = 0.99
    values[0, 0, 0] = -1.0
    found = hs.measure.saturation(values)
    assert found.units.tolist() == pytest.approx([1 / 6, 1.0])
    assert found.steps.tolist() == pytest.approx([0.75, 0.5, 0.5])
    assert found.share == pytest.approx(7 / 12)
    assert (found.mean_abs, found.max_abs) == (pytest.approx((6 * 0.99 + 1) / 12), 1.0)


def test_a_step_that_no_row_reaches_has_no_rate():
    found = hs.measure.saturation(torch.ones(2, 3, 1), lengths=torch.tensor([1, 2]))
    assert found.steps[:2].tolist() == [1, 1]
    assert found.steps[2].isnan()


def test_gates_are_measured_by_their_own_range():
    gate = torch.tensor([0.01, 0.5, 0.99, 0.2]).reshape(1, 4, 1)
    traj = Trajectory(torch.zeros(1, 4, 1), gates={"forget": gate, "candidate": -gate}, kind="lstm")
    found = hs.measure.saturation(traj)
    assert found.share == 0
    assert found.gates["forget"].share == 0.5  # both ends of a sigmoid
    assert found.gates["candidate"].share == 0.25  # one end of a tanh
    assert found.gates["forget"].range == "sigmoid"
    assert "forget: 50.0% saturated (≥ 0.95 of the range of sigmoid)" in str(found)


@pytest.mark.parametrize(
    ("traj", "options"),
    [
        (torch.full((1, 2, 1), 3.0), {"activation": "relu"}),
        (Trajectory(torch.full((1, 2, 1), 3.0), kind="rnn"), {}),  # no tanh gives 3
        (Trajectory(torch.zeros(1, 2, 1), c=torch.full((1, 2, 1), 3.0), kind="lstm"), {"part": "c"}),
    ],
)
def test_what_has_no_bounds_cannot_saturate(traj, options):
    found = hs.measure.saturation(traj, **options)
    assert (found.share, found.range, float(found.units)) == (0, "none", 0)
    assert found.max_abs == 3
    assert "cannot saturate" in str(found)


def test_the_activation_can_be_said():
    assert hs.measure.saturation(torch.full((1, 1, 1), 0.01), activation="sigmoid").share == 1


def test_a_plain_tensor_is_measured_against_tanh():
    assert hs.measure.saturation(torch.full((1, 1, 1), 2.0)).share == 1


def test_nan_is_said_with_step_and_row():
    values = torch.zeros(2, 3, 1)
    values[1, 2] = NAN
    with pytest.raises(BadInput, match="nan at step 2 of row 1"):
        hs.measure.saturation(values)


@pytest.mark.parametrize("threshold", [0, -1, 1.5])
def test_a_threshold_outside_the_range_is_refused(threshold):
    with pytest.raises(BadInput, match="above 0 and up to 1, but is"):
        hs.measure.saturation(torch.zeros(1, 1, 1), threshold)


def test_an_unknown_activation_is_refused():
    with pytest.raises(BadInput, match=r"one of auto, tanh.*but is 'gelu'"):
        hs.measure.saturation(torch.zeros(1, 1, 1), activation="gelu")


def test_of_a_real_recording():
    model = torch.nn.LSTM(3, 4, batch_first=True)
    with hs.record(model, gates=True) as rec:
        model(100 * torch.randn(2, 6, 3))
    found = hs.measure.saturation(rec["l0"])
    assert set(found.gates) == {"input", "forget", "candidate", "output"}
    assert found.gates["forget"].share > 0.5  # gates of huge inputs are at their ends


@given(seed=st.integers(0, 1000), times=st.lists(st.integers(1, 6), min_size=2, max_size=4))
def test_many_runs_of_unequal_length_are_as_one_padded_batch(seed, times):
    generator = torch.Generator().manual_seed(seed)
    runs = [torch.rand(2, time, 3, generator=generator, dtype=torch.float64) * 2 - 1 for time in times]
    padded = torch.cat([torch.nn.functional.pad(run, (0, 0, 0, max(times) - run.shape[1])) for run in runs])
    lengths = torch.tensor(times).repeat_interleave(2)
    for expected, found in (
        (hs.measure.saturation(padded, 0.5, lengths=lengths), hs.measure.saturation(iter(runs), 0.5)),
        (hs.measure.saturation(padded * 3, 0.5, lengths=lengths), hs.measure.saturation([3 * r for r in runs], 0.5)),
    ):
        assert found.share == pytest.approx(expected.share)
        torch.testing.assert_close(found.units.double(), expected.units.double())
        torch.testing.assert_close(found.steps.double(), expected.steps.double())
        assert (found.mean_abs, found.max_abs) == pytest.approx((expected.mean_abs, expected.max_abs))


def test_gates_of_many_runs_are_measured_together():
    model = torch.nn.LSTM(2, 3, batch_first=True)
    with hs.record(model, gates=True) as rec:
        for steps in (3, 8):
            model(torch.randn(1, steps, 2) * 50)
    found = hs.measure.saturation(rec.runs("l0"))
    whole = torch.cat([run.gates["input"].flatten() for run in rec.runs("l0")])
    assert found.gates["input"].share == pytest.approx(float(((whole >= 0.95) | (whole <= 0.05)).double().mean()))


def test_one_run_that_exceeds_a_tanh_tells_that_none_of_them_saturates():
    runs = [Trajectory(torch.full((1, 2, 1), value), kind="rnn") for value in (0.99, 3.0)]
    found = hs.measure.saturation(runs)
    assert (found.range, found.share, found.max_abs) == ("none", 0, 3)
    assert found.steps.tolist() == [0, 0]


def test_a_model_beside_its_data_is_told_how_its_states_are_got():
    with pytest.raises(BadInput, match=r"this is GRU.*hs\.measure\.runs_of\(model, loader\)"):
        hs.measure.saturation(torch.nn.GRU(3, 4), [torch.randn(2, 5, 3)])
