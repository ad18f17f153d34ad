import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hiddenstate.errors import BadInput
from hiddenstate.plot import project


@given(states=st.integers(1, 12), units=st.integers(1, 12), components=st.integers(1, 3))
def test_axes_are_those_of_a_plain_svd(states, units, components):
    cloud = torch.randn(states, units, dtype=torch.float64)
    plane = project(cloud, components)
    strength = torch.linalg.svdvals(cloud - cloud.mean(0)) ** 2
    share = (strength / strength.sum().clamp(min=1e-300))[:components]
    expected = torch.cat([share, share.new_zeros(components - len(share))]).float()
    torch.testing.assert_close(plane.explained, expected, atol=1e-5, rtol=1e-4)
    # The variance along each axis is what that axis is said to hold.
    held = plane(cloud).double().pow(2).sum(0)
    torch.testing.assert_close(held, expected.double() * strength.sum(), atol=1e-4, rtol=1e-3)


@given(states=st.integers(2, 8), units=st.integers(2, 8))
def test_two_runs_do_not_draw_mirror_images(states, units):
    cloud = torch.randn(states, units)
    assert torch.equal(project(cloud).axes, project(cloud.clone()).axes)
    for axis in project(cloud).axes:
        assert axis[axis.abs().argmax()] >= 0


def test_more_units_than_can_be_decomposed_in_full_still_have_their_plane():
    line = torch.linspace(-1, 1, 40).unsqueeze(1) * torch.ones(1, 2500)
    assert project(line).explained.tolist() == pytest.approx([1.0, 0.0], abs=1e-6)


def test_of_very_many_states_some_give_the_axes_and_it_is_said():
    cloud = torch.randn(9000, 1000) * torch.tensor([5.0, 3.0] + [0.1] * 998)
    plane = project(cloud)
    assert plane.note == "axes from every 3rd of 9,000 states"
    assert plane.axes[0].abs().argmax() == 0
    assert plane.axes[1].abs().argmax() == 1
    assert project(cloud[:100]).note == ""


def test_states_with_nan_are_left_out_and_nothing_but_nan_is_refused():
    cloud = torch.randn(9, 3)
    spoilt = torch.cat([cloud, torch.full((1, 3), torch.nan)])
    torch.testing.assert_close(project(spoilt).axes, project(cloud).axes)
    with pytest.raises(BadInput, match="no state without NaN or Inf"):
        project(torch.full((4, 3), torch.inf))


def test_an_axis_is_labeled_with_its_share():
    assert project(torch.eye(2)[:, :1]).label(0) == "PC 1 (100% of variance)"
