"""Saturated shares of units and steps, as bars where they fit and sorted where not."""

import pytest
import torch

from hiddenstate import measure, plot
from hiddenstate.errors import BadInput
from tests.plot.gallery import pressed, title, walk


def test_few_units_have_a_bar_each_at_their_own_place():
    ax = plot.saturation(pressed(5))
    assert [bar.get_height() for bar in ax.patches] == pytest.approx(pressed(5).units.tolist())
    assert title(ax) == "30.4% saturated over all (dashed)"


def test_many_units_are_sorted_and_the_axis_says_so():
    result = pressed(5000)
    ax = plot.saturation(result)
    assert ax.get_xlabel() == "5,000 units, most saturated first"
    assert ax.lines[0].get_ydata().tolist() == pytest.approx(result.units.sort(descending=True).values.tolist())


def test_steps_are_drawn_in_their_order_and_one_that_no_row_reaches_leaves_a_gap():
    result = pressed(5)
    result.steps[2] = torch.nan
    ax = plot.saturation(result, by="step")
    ax.get_figure().canvas.draw()
    assert (ax.get_xlabel(), ax.get_ylabel()) == ("step", "saturated units (beyond 0.95 of the range)")
    assert ax.lines[0].get_ydata().tolist() == pytest.approx(result.steps.tolist(), nan_ok=True)


def test_the_overall_share_is_a_line():
    result = pressed(5)
    assert set(plot.saturation(result).lines[-1].get_ydata()) == {result.share}


def test_the_measure_itself_is_drawn():
    found = measure.saturation(walk())
    bars = plot.saturation(found).patches
    assert [bar.get_height() for bar in bars] == pytest.approx(found.units.tolist())


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: plot.saturation(walk()), "a result of measure.saturation, but this is Trajectory"),
        (lambda: plot.saturation(measure.dead_units(walk())), "a result of measure.saturation, but this is DeadUnits"),
        (lambda: plot.saturation(pressed(3), by="row"), "by is 'unit' or 'step', but is 'row'"),
    ],
)
def test_what_cannot_be_drawn_is_refused_by_name(call, message):
    with pytest.raises(BadInput, match=message):
        call()


@pytest.mark.parametrize("by", ["unit", "step"])
def test_where_nothing_is_saturated_the_picture_says_so(by):
    ax = plot.saturation(measure.saturation(torch.zeros(2, 9, 4)), by=by)
    assert title(ax) == "nothing is saturated"
