"""What all pictures share: where they are drawn, and how text comes out as it was written."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from matplotlib import pyplot

from hiddenstate import measure, plot
from hiddenstate.plot.canvas import color_bar, label_steps, new_ax, plain, tidy
from tests.plot.gallery import title


def test_an_ax_that_is_given_is_the_one_that_is_used():
    _, ax = pyplot.subplots()
    assert new_ax(ax, size=(1, 1), depth=True) is ax


def test_a_new_figure_has_the_size_and_depth_asked_for():
    flat, deep = new_ax(None, size=(3, 2)), new_ax(None, depth=True)
    assert flat.get_figure().get_size_inches().tolist() == [3, 2]
    assert (flat.name, deep.name) == ("rectilinear", "3d")


@given(count=st.integers(1, 300), most=st.integers(1, 60))
def test_labels_stand_at_their_own_steps_and_are_not_too_many(count, most):
    labels = [f"{step}" for step in range(count)]
    written = []
    label_steps(lambda at, text, **_: written.extend(zip(at, text, strict=True)), labels, most=most)
    assert len(written) <= most
    assert all(text == str(at) for at, text in written)
    assert (len(written) == count) == (count <= most)


@pytest.mark.parametrize(
    ("labels", "turned"),
    [
        (["a", "bc"] * 20, False),
        (["the", "film", "was", "bad"], False),
        (["a", "bcd"] * 8, True),
        (["word"] * 13, True),
    ],
)
def test_labels_that_need_too_much_room_are_turned(labels, turned):
    how = {}
    label_steps(lambda at, text, **options: how.update(options), labels)
    assert (how.get("rotation") == 90) == turned


def test_a_dollar_begins_no_formula():
    _, ax = pyplot.subplots()
    tidy(ax, title="$x", x="step", y="unit")
    assert (title(ax), ax.get_xlabel(), ax.get_ylabel()) == (plain("$x"), "step", "unit")
    ax.get_figure().canvas.draw()  # a formula that does not end would fail here
    assert not ax.spines["top"].get_visible()


def test_a_color_bar_stands_beside_the_picture_with_its_label():
    _, ax = pyplot.subplots()
    color_bar(ax, ax.imshow([[0, 1]]), "weight")
    (_, bar) = ax.get_figure().axes
    assert bar.get_ylabel() == "weight"


@pytest.mark.parametrize("steps", [2, 3, 8, 20, 21, 50])
def test_axes_that_count_have_whole_numbers(steps):
    found = measure.probe(torch.randn(20, steps, 2), torch.arange(20) % 2)
    weights = torch.randn(4, steps).softmax(1)
    pictures = [plot.heatmap(torch.randn(3, steps, 5)), plot.probe(found)]
    for ax in (*pictures, plot.attention(weights), plot.attention(weights[0])):
        ax.figure.draw_without_rendering()
        for axis in [ax.xaxis, *([ax.yaxis] if ax.get_ylabel() in ("unit", "row") else [])]:
            low, high = sorted(axis.get_view_interval())
            ticks = [tick for tick in axis.get_majorticklocs() if low <= tick <= high]
            assert ticks
            assert all(float(tick).is_integer() for tick in ticks)
