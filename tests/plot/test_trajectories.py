"""Paths of states: each row its own, all in one plane."""

import pytest
import torch
from matplotlib import pyplot

from hiddenstate import plot
from hiddenstate.errors import BadInput
from hiddenstate.plot import project
from hiddenstate.recording import Trajectory
from tests.plot.gallery import texts, title, walk, waves


def segments(ax):
    return [c.get_segments() for c in ax.collections if hasattr(c, "get_segments")]


def test_a_path_goes_through_the_projections_of_its_states():
    h = waves(steps=9)
    (path,) = segments(plot.trajectories(h))
    points = project(h[0])(h[0])
    torch.testing.assert_close(torch.tensor([segment[0].tolist() for segment in path]), points[:-1])
    torch.testing.assert_close(torch.tensor([segment[1].tolist() for segment in path]), points[1:])


def test_each_row_is_a_path_of_its_own_length():
    traj = Trajectory(waves(rows=2, steps=9), torch.tensor([9, 4]))
    assert [len(path) for path in segments(plot.trajectories(traj))] == [8, 3]


def test_start_and_end_are_marked():
    h = waves(steps=9)
    marks = [c for c in plot.trajectories(h).collections if not hasattr(c, "get_segments")]
    first, last = (mark.get_offsets()[0].tolist() for mark in marks)
    points = project(h[0])(h[0])
    assert first == pytest.approx(points[0].tolist())
    assert last == pytest.approx(points[-1].tolist())


def test_several_trajectories_share_one_plane():
    ax = plot.trajectories([waves(rows=2), walk()], labels=["a", "b", "c"])
    assert texts(ax) == ["  a", "  b", "  c"]


def test_more_rows_than_can_be_told_apart_are_thinned():
    assert title(plot.trajectories(waves(rows=100))) == "every 5th of 100 rows"


def test_three_components_need_depth():
    _, ax = pyplot.subplots()
    with pytest.raises(BadInput, match="3 components need a 3-D ax"):
        plot.trajectories(waves(), ax, components=3)
    assert plot.trajectories(waves(), components=3).name == "3d"


def test_a_row_of_one_step_is_a_point():
    ax = plot.trajectories(waves(steps=1))
    ax.get_figure().canvas.draw()
    assert segments(ax) == [[]]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: plot.trajectories(waves(), components=4), "in 2 or 3 components, but 4"),
        (lambda: plot.trajectories(waves(), labels=["a", "b"]), "2 labels, but 1 rows"),
        (lambda: plot.trajectories([waves(), waves(units=3)]), r"the same units, but these have \[3, 6\]"),
        (lambda: plot.trajectories(waves(rows=0)), "no row with a step in it"),
    ],
)
def test_what_cannot_be_drawn_is_refused_by_name(call, message):
    with pytest.raises(BadInput, match=message):
        call()


def test_states_that_jump_are_points_and_the_title_says_so():
    ax = plot.trajectories(torch.randn(2, 60, 5))
    assert title(ax) == "no lines: states jump from step to step"
    assert not [one for one in ax.collections if type(one).__name__ == "LineCollection"]


def test_states_that_do_not_move_are_said_not_to():
    assert "no path: the states do not move" in title(plot.trajectories(torch.ones(2, 9, 4)))
