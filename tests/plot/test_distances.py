"""Distances of all pairs, as a square that keeps its diagonal."""

from itertools import pairwise

import pytest
import torch
from matplotlib import pyplot

from hiddenstate import measure, plot
from hiddenstate.errors import BadInput
from tests.plot.gallery import sentences, settling, square, title, waves


def test_each_pair_has_its_own_cell():
    (image,) = plot.distances(square(5)).images
    torch.testing.assert_close(torch.from_numpy(image.get_array().data), square(5))
    assert image.get_extent() == [-0.5, 4.5, 4.5, -0.5]


def test_pairs_of_steps_show_where_they_settle():
    ax = plot.distances(settling())
    assert (ax.get_xlabel(), title(ax)) == ("step", "settles at step 7 (dashed)")


def test_a_state_that_never_settles_has_no_line():
    assert not plot.distances(settling(None)).lines


def test_labels_stand_on_both_sides():
    ax = plot.distances(square(3), labels=["x", "y", "z"])
    assert [t.get_text() for t in ax.get_xticklabels()] == [t.get_text() for t in ax.get_yticklabels()] == list("xyz")


def test_five_thousand_are_thinned_on_both_sides():
    ax = plot.distances(torch.zeros(5000, 5000))
    assert ax.get_xlabel() == ax.get_ylabel() == "row (every 13th of 5,000 rows)"
    assert ax.images[0].get_array().shape == (385, 385)


def test_results_of_measures_say_what_their_pairs_are():
    rows = measure.compare(waves(rows=3))
    steps = measure.positions(torch.nn.GRU(1, 3), steps=6)
    assert (plot.distances(rows).get_xlabel(), plot.distances(steps).get_xlabel()) == ("row", "step")


def test_where_the_state_settles_the_line_is_drawn():
    (line,) = plot.distances(settling()).lines
    assert list(line.get_xdata()) == [7, 7]


def test_a_comparison_brings_its_own_labels():
    found = sentences()
    shown = [text.get_text() for text in plot.distances(found).get_yticklabels()]
    assert shown[0] == "the dog barks"
    assert shown[-1] == "the rain has not stopped…"[:23].rstrip() + "…"  # a long one leaves room for the picture
    assert [t.get_text() for t in plot.distances(found, labels=list("abcdef")).get_xticklabels()] == list("abcdef")
    assert [t.get_text() for t in plot.distances(measure.compare(waves(2), labels=[7, 8])).get_xticklabels()] == [
        "7",
        "8",
    ]


def test_limits_make_two_pictures_comparable():
    assert plot.distances(square(3), limits=(0, 9)).images[0].get_clim() == (0, 9)


def test_an_array_is_drawn_like_a_tensor():
    (image,) = plot.distances(square(3).numpy()).images
    torch.testing.assert_close(torch.from_numpy(image.get_array().data), square(3))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: plot.distances(torch.zeros(2, 3)),
            r"distances are \(n, n\).* this is \(2, 3\).*\(hs.measure.compare",
        ),
        (lambda: plot.distances(square(3), labels=["a"]), "1 labels, but 3 rows: one for each row"),
    ],
)
def test_what_cannot_be_drawn_is_refused_by_name(call, message):
    with pytest.raises(BadInput, match=message):
        call()


@pytest.mark.parametrize("small", [False, True])
@pytest.mark.parametrize("rows", [3, 24, 96])
def test_names_never_cover_each_other_and_those_left_out_are_said(rows, small):
    quarter = pyplot.figure(figsize=(8, 6), layout="constrained").add_subplot(2, 2, 1) if small else None
    ax = plot.distances(square(rows), quarter, labels=[f"sentence number {n}" for n in range(rows)])
    figure = ax.get_figure()
    figure.canvas.draw()
    for names in (ax.get_xticklabels(), ax.get_yticklabels()):
        boxes = [text.get_window_extent() for text in names]
        assert not any(one.overlaps(other) for one, other in pairwise(boxes))
        assert (len(names) < rows) == ("names)" in ax.get_xlabel())
    pyplot.close(figure)


def test_a_square_of_zeros_says_so():
    ax = plot.distances(torch.zeros(4, 4))
    assert title(ax) == "all distances are 0"
    assert ax.images[0].get_clim() == (0, 1)
