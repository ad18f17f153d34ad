"""What each step knows: scores along time, beside what luck would give."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from hiddenstate import measure, plot, record
from hiddenstate.errors import BadInput
from tests.plot.gallery import knowing, title, waves


def scores(ax):
    return [line for line in ax.lines if line.get_gid() == "score"]


def names(ax):
    return [text.get_text() for text in ax.get_legend().get_texts()]


def test_the_score_of_each_step_is_drawn_with_chance_and_shuffled_targets():
    found = knowing()
    ax = plot.probe(found)
    (line,) = scores(ax)
    assert list(line.get_ydata()) == found.accuracy.tolist()
    assert names(ax) == ["accuracy", "shuffled targets", "chance"]
    assert (ax.get_xlabel(), ax.get_ylabel()) == ("step", "accuracy on unseen rows")


def test_each_track_of_a_recording_has_a_line():
    model, x = nn.LSTM(2, 6, num_layers=2, batch_first=True), torch.randn(40, 5, 2)
    with record(model) as rec:
        model(x)
    ax = plot.probe(measure.probe(rec, x[:, 0, 0] > 0), tokens=list("abcde"))
    assert names(ax)[0] == "l0"
    assert len(scores(ax)) == 2
    assert [text.get_text() for text in ax.get_xticklabels()] == list("abcde")


def test_real_targets_have_an_r2_that_may_fall_below_zero():
    states = torch.randn(30, 4, 3)
    ax = plot.probe(measure.probe(states, states[:, 1, 0]))
    assert ax.get_ylabel() == "R² on unseen rows"
    assert ax.get_ylim()[0] < 0


def test_several_are_drawn_into_one_ax_in_colors_of_their_own():
    ax = plot.probe(knowing(), label="trained")
    plot.probe(knowing(top=0.6), ax, label="random")
    one, other = scores(ax)
    assert one.get_color() != other.get_color()
    assert names(ax) == ["trained", "random", "shuffled targets", "chance"]


def test_an_interrupted_probe_says_so():
    assert title(plot.probe(replace(knowing(), interrupted=True))) == "interrupted: later steps are missing"


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: plot.probe(waves()), "a result of measure.probe, but this is Tensor"),
        (lambda: plot.probe({}), "no probe to draw: the mapping is empty"),
        (lambda: plot.probe({"a": knowing(), "b": replace(knowing(), classes=0)}), "others an R².* cannot share one"),
        (lambda: plot.probe(knowing(), tokens=["a"]), "1 tokens, but 12 steps"),
    ],
)
def test_what_cannot_be_drawn_is_refused_by_name(call, message):
    with pytest.raises(BadInput, match=message):
        call()


def test_what_lines_are_held_against_comes_last_in_the_legend():
    ax = plot.probe({"l0": knowing(), "l1": knowing()})
    assert names(ax) == ["l0", "l1", "shuffled targets", "chance"]


def test_steps_that_too_few_rows_reach_are_said():
    ax = plot.probe(measure.probe(waves(rows=8), [0, 1] * 4))
    steps = len(scores(ax)[0].get_ydata())
    assert title(ax) == f"too few rows for a score at {steps} of {steps} steps"
