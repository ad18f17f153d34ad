"""Fixed points in a plane: stable ones filled, unstable ones hollow, over the paths that lead there."""

from dataclasses import replace

import pytest
import torch

from hiddenstate import measure, plot
from hiddenstate.errors import BadInput
from hiddenstate.plot import project
from tests.plot.gallery import corners, title, walk, waves


def test_points_are_drawn_where_they_are_in_the_plane():
    result = corners()
    plane = project(result.points)
    filled, hollow = plot.fixed_points(result).collections
    torch.testing.assert_close(torch.tensor(filled.get_offsets().tolist()), plane(result.points[result.stable]))
    torch.testing.assert_close(torch.tensor(hollow.get_offsets().tolist()), plane(result.points[~result.stable]))
    assert len(filled.get_facecolor()) == 1
    assert len(hollow.get_facecolor()) == 0


def test_stable_and_unstable_are_counted():
    legend = plot.fixed_points(corners()).get_legend()
    assert [text.get_text() for text in legend.get_texts()] == ["4 stable", "5 unstable"]


def test_points_of_h_and_c_are_drawn_over_paths_of_h():
    result = replace(corners(), points=torch.randn(3, 8), stable=torch.tensor([True, False, True]))
    h = waves(rows=2, units=4)
    ax = plot.fixed_points(result, traj=h)
    plane = project(torch.cat([result.points[:, :4], *h]))
    assert len(ax.lines) == 2
    torch.testing.assert_close(torch.from_numpy(ax.lines[1].get_xydata()).float(), plane(h[1]))


def test_none_found_is_said():
    none = replace(corners(), points=torch.zeros(0, 3), stable=torch.zeros(0, dtype=torch.bool))
    assert title(plot.fixed_points(none)) == "no fixed points found"


def test_of_many_paths_some_are_drawn_and_it_is_said():
    ax = plot.fixed_points(corners(), traj=waves(rows=100, units=2))
    assert title(ax) == "paths: every 5th of 100 rows"
    assert len(ax.lines) == 20


def test_the_measure_itself_is_drawn():
    found = measure.fixed_points(torch.nn.GRU(2, 4, batch_first=True), starts=32)
    assert sum(len(cloud.get_offsets()) for cloud in plot.fixed_points(found).collections) == len(found.points)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: plot.fixed_points(walk()), "a result of measure.fixed_points, but this is Trajectory"),
        (lambda: plot.fixed_points(corners(), traj=waves()), "have 2 coordinates, but the trajectory has 6 units"),
    ],
)
def test_what_cannot_be_drawn_is_refused_by_name(call, message):
    with pytest.raises(BadInput, match=message):
        call()
