"""The curve of influence over lag: its marks, its words, and several of them in one picture."""

from dataclasses import replace

import pytest
import torch
from matplotlib import pyplot

from hiddenstate import measure, plot
from hiddenstate.errors import BadInput
from tests.plot.gallery import fading, texts, title


def curves(ax):
    return [line for line in ax.lines if line.get_gid() == "curve"]


def test_the_curve_is_drawn_as_it_was_measured():
    result = fading()
    (line,) = curves(plot.memory(result))
    assert line.get_xdata().tolist() == list(range(30))
    assert line.get_ydata().tolist() == pytest.approx(result.curve.tolist())


def test_the_band_lies_around_the_curve():
    result = fading(lags=4)
    (band,) = plot.memory(result).collections
    corners = band.get_paths()[0].vertices
    for lag in range(4):
        heights = corners[corners[:, 0] == lag, 1]
        middle = result.rows[:, lag].quantile(torch.tensor([0.1, 0.9])).tolist()
        assert [heights.min(), heights.max()] == pytest.approx(middle)


def test_threshold_and_effective_length_are_drawn():
    ax = plot.memory(fading())
    assert title(ax) == "effective length: 21 steps, half-life 3.11"
    assert texts(ax) == ["0.01 of the peak"]
    levels = [line.get_ydata()[0] for line in ax.lines if len(set(line.get_ydata())) == 1]
    assert pytest.approx(0.01) in levels
    assert [20, 20] in [list(line.get_xdata()) for line in ax.lines]


def test_a_curve_that_ends_above_the_threshold_is_said_to():
    result = replace(fading(), cut_off=True)
    assert title(plot.memory(result)).startswith("effective length: at least 21")


def test_zeros_fit_on_a_log_scale():
    result = fading()
    result.curve[20:] = 0
    ax = plot.memory(result)
    assert ax.get_ylim()[0] > 0
    ax.get_figure().canvas.draw()


def test_an_input_that_moves_nothing_is_said_to():
    still = replace(fading(), curve=torch.zeros(9), rows=torch.zeros(2, 9))
    ax = plot.memory(still)
    assert title(ax) == "the input does not move the output at all"
    assert ax.get_yscale() == "linear"


def test_two_curves_are_told_apart():
    ax = plot.memory(fading(), label="gru")
    plot.memory(fading(rate=0.5), ax, label="rnn")
    assert [text.get_text() for text in ax.get_legend().get_texts()] == ["gru", "rnn"]
    assert len({line.get_color() for line in ax.lines if line.get_gid() == "curve"}) == 2


def test_the_measure_itself_is_drawn():
    found = measure.memory(torch.nn.LSTM(2, 5, batch_first=True), torch.randn(3, 12, 2))
    ax = plot.memory(found)
    assert curves(ax)[0].get_ydata().tolist() == pytest.approx(found.curve.tolist())
    assert title(ax).endswith(f"{found.length} steps, half-life {found.half_life:.3g}")


def test_the_threshold_is_written_once_in_a_picture_of_several():
    _, ax = pyplot.subplots()
    plot.memory(fading(), ax, label="a")
    plot.memory(fading(rate=0.7), ax, label="b")
    assert texts(ax) == ["0.01 of the peak"]


def test_what_is_no_result_is_refused_by_name():
    with pytest.raises(BadInput, match=r"a result of measure.memory, but this is int"):
        plot.memory(3)


def test_a_mean_that_few_rows_make_up_is_said_to_lie_beyond_the_band():
    class Spread(torch.nn.Module):
        """Each row has a gain of its own, and one of them is huge."""

        def __init__(self):
            super().__init__()
            self.gru = torch.nn.GRU(3, 8, batch_first=True)

        def forward(self, x):
            gain = torch.ones(len(x), 1, 1)
            gain[0] = 1e6
            return self.gru(x)[0] * gain

    x, said = torch.randn(20, 12, 3), "above the band a few rows make up the mean"
    assert said in texts(plot.memory(measure.memory(Spread(), x)))
    assert said not in texts(plot.memory(measure.memory(torch.nn.GRU(3, 8, batch_first=True), x)))
