"""Attention weights over steps: bars for one row, a map for several."""

import numpy as np
import pytest
import torch

from hiddenstate import measure, plot
from hiddenstate.errors import BadInput
from tests.plot.gallery import title


def test_one_row_is_bars_of_its_weights():
    weights = torch.tensor([0.2, 0.5, 0.3])
    ax = plot.attention(weights, labels=["head 0"])
    assert [bar.get_height() for bar in ax.patches] == pytest.approx(weights.tolist())
    assert [bar.get_x() + bar.get_width() / 2 for bar in ax.patches] == pytest.approx([0, 1, 2])
    assert (ax.get_ylabel(), title(ax)) == ("weight", "head 0")


def test_several_rows_are_a_map_with_their_labels():
    weights = torch.rand(2, 4)
    ax = plot.attention(weights, labels=["a", "b"], tokens=list("wxyz"))
    (image,) = ax.images
    torch.testing.assert_close(torch.from_numpy(image.get_array().data), weights)
    assert [label.get_text() for label in ax.get_yticklabels()] == ["a", "b"]
    assert [label.get_text() for label in ax.get_xticklabels()] == list("wxyz")


def test_weights_of_thousands_of_steps_are_averaged_and_it_is_said():
    ax = plot.attention(torch.full((5000,), 1 / 5000))
    assert ax.get_xlabel() == "step (means of 7 of 5,000 steps)"
    assert plot.attention(torch.ones(3, 5000)).get_xlabel() == "step (means of 7 of 5,000 steps)"


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: plot.attention(torch.zeros(2, 3, 4)), r"but this is \(2, 3, 4\). Of \(batch, head, time\) choose"),
        (lambda: plot.attention(torch.zeros(2, 3), labels=["a"]), "1 labels, but 2 rows"),
        (lambda: plot.attention(torch.zeros(3), tokens=["a"]), "1 tokens, but 3 steps"),
    ],
)
def test_what_cannot_be_drawn_is_refused_by_name(call, message):
    with pytest.raises(BadInput, match=message):
        call()


def test_weights_that_are_no_numbers_are_said():
    weights = torch.tensor([[0.5, 0.5], [float("nan"), float("inf")]])
    assert title(plot.attention(weights)) == "2 of 4 weights are NaN or Inf"
    assert title(plot.attention(weights[1], labels=["x"])) == "x · 2 of 2 weights are NaN or Inf"


def made(looks):
    weights = torch.rand(3, looks, 5)
    return measure.AttentionWeights(weights / weights.sum(-1, keepdim=True), "model.py:7", "softmax")


def test_results_of_the_measure_are_drawn_as_they_are():
    one, several = made(1), made(4)
    drawn = plot.attention((one,))
    assert (drawn.get_ylabel(), title(drawn)) == ("row", "")
    assert np.allclose(drawn.images[0].get_array(), one.weights[:, 0])
    drawn = plot.attention(several, row=-1, labels=list("abcd"))
    assert (drawn.get_ylabel(), title(drawn)) == ("look", "row 2")
    assert np.allclose(drawn.images[0].get_array(), several.weights[2])


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: plot.attention((made(1), made(4))), r"2 lines of code made weights \(0 at model.py:7, 1 .*found\[0\]"),
        (lambda: plot.attention(made(4), row=3), "row 3 was asked for, but there are weights of 3 rows"),
        (lambda: plot.attention(made(4), labels=["a"]), "1 labels, but 4 looks: one for each look"),
    ],
)
def test_results_that_do_not_fit_are_refused_by_name(call, message):
    with pytest.raises(BadInput, match=message):
        call()
