import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import hiddenstate as hs
from hiddenstate.errors import BadInput


@given(seed=st.integers(0, 100), units=st.integers(2, 6))
def test_it_is_the_participation_ratio_of_the_covariance(seed, units):
    values = torch.randn(3, 7, units, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    eigenvalues = torch.linalg.eigvalsh(torch.cov(values.reshape(-1, units).T)).flip(0)
    found = hs.measure.dimension(values)
    torch.testing.assert_close(found.spectrum, eigenvalues)
    assert found.value == pytest.approx(float(eigenvalues.sum() ** 2 / (eigenvalues**2).sum()))


def test_a_ball_has_all_dimensions_and_a_circle_two():
    ball = torch.randn(1, 20000, 5)
    assert hs.measure.dimension(ball).value == pytest.approx(5, rel=0.01)
    angle = torch.arange(100) * 2 * torch.pi / 100
    circle = torch.stack([angle.cos(), angle.sin()], dim=1) @ torch.linalg.qr(torch.randn(5, 2))[0].T
    found = hs.measure.dimension(circle.unsqueeze(0))
    assert found.value == pytest.approx(2, abs=1e-5)
    assert str(found).startswith("2.00 of 5 dimensions (participation ratio); 2 hold 90%")


def test_turning_and_scaling_change_nothing():
    values = torch.randn(2, 50, 4, dtype=torch.float64) * torch.tensor([1.0, 2.0, 3.0, 4.0])
    turn = torch.linalg.qr(torch.randn(4, 4, dtype=torch.float64))[0]
    assert hs.measure.dimension(3 * values @ turn + 5).value == pytest.approx(hs.measure.dimension(values).value)


def test_padding_does_not_count():
    values = torch.randn(2, 6, 3)
    values[1, 2:] = float("nan")
    alone = torch.cat([values[0], values[1, :2]]).unsqueeze(0)
    padded = hs.measure.dimension(values, lengths=torch.tensor([6, 2]))
    assert padded.value == pytest.approx(hs.measure.dimension(alone).value)


def test_fewer_states_than_units_leave_zeros_in_the_spectrum():
    found = hs.measure.dimension(torch.randn(1, 3, 8))
    assert found.spectrum.shape == (8,)
    assert int((found.spectrum > 0).sum()) == 2


def test_states_that_never_move_have_no_dimension():
    found = hs.measure.dimension(torch.full((2, 5, 3), 0.1))
    assert found.value == 0
    assert str(found).startswith("0.00 of 3")


def test_one_state_alone_is_refused():
    with pytest.raises(BadInput, match="one state alone has no dimension"):
        hs.measure.dimension(torch.randn(1, 1, 3))


def test_many_runs_of_unequal_length_are_as_one():
    runs = [torch.randn(2, steps, 6, dtype=torch.float64) + steps for steps in (1, 4, 30, 2)]
    whole = torch.cat([run.flatten(0, 1) for run in runs]).unsqueeze(0)
    expected, found = hs.measure.dimension(whole), hs.measure.dimension(iter(runs))
    assert found.value == pytest.approx(expected.value)
    torch.testing.assert_close(found.spectrum, expected.spectrum)


@pytest.mark.parametrize(
    ("states", "said"), [(100, "a lower bound, since 100 states of a full ball would show 33.0"), (5000, "")]
)
def test_too_few_states_to_fill_their_dimensions_are_said_to_be(states, said):
    found = hs.measure.dimension(torch.randn(1, states, 50))
    assert found.states == states
    assert (said in str(found)) if said else ("lower bound" not in str(found))
