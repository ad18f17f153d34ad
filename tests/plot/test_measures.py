"""The pictures of results: they say the numbers they were given, and refuse what is no result."""

from types import SimpleNamespace

import pytest
import torch
from matplotlib import pyplot

from hiddenstate import measure, plot
from hiddenstate.errors import BadInput
from hiddenstate.recording import Trajectory
from tests.plot.gallery import corners, fading, pressed, ring, square, walk, waves


def title(ax):
    return ax.get_title(loc="left")


def texts(ax):
    return [text.get_text() for text in ax.texts]


class TestMemory:
    def test_threshold_and_effective_length_are_drawn(self):
        ax = plot.memory(fading())
        assert title(ax) == "effective length: 21 steps, half-life 3.11"
        assert texts(ax) == ["0.01 of the peak"]
        levels = [line.get_ydata()[0] for line in ax.lines if len(set(line.get_ydata())) == 1]
        assert pytest.approx(0.01) in levels
        assert [20, 20] in [list(line.get_xdata()) for line in ax.lines]

    def test_a_curve_that_ends_above_the_threshold_is_said_to(self):
        result = fading()
        result.cut_off = True
        assert title(plot.memory(result)).startswith("effective length: at least 21")

    def test_zeros_fit_on_a_log_scale(self):
        result = fading()
        result.curve[20:] = 0
        ax = plot.memory(result)
        assert ax.get_ylim()[0] > 0
        ax.get_figure().canvas.draw()

    def test_an_input_that_moves_nothing_is_said_to(self):
        still = SimpleNamespace(
            **{**vars(fading()), "curve": torch.zeros(9), "low": torch.zeros(9), "high": torch.zeros(9)}
        )
        ax = plot.memory(still)
        assert title(ax) == "the input does not move the output at all"
        assert ax.get_yscale() == "linear"

    def test_two_curves_are_told_apart(self):
        ax = plot.memory(fading(), label="gru")
        plot.memory(fading(rate=0.5), ax, label="rnn")
        assert [text.get_text() for text in ax.get_legend().get_texts()] == ["gru", "rnn"]
        assert len({line.get_color() for line in ax.lines if line.get_gid() == "curve"}) == 2

    def test_the_measure_itself_is_drawn(self):
        plot.memory(measure.memory(torch.nn.LSTM(2, 5, batch_first=True), torch.randn(3, 12, 2)))


class TestSpectrum:
    def test_what_lies_outside_the_circle_is_counted(self):
        assert title(plot.spectrum(torch.tensor([0.5, 1.5, -2.0]))) == "largest modulus 2; 2 of 3 outside (▲)"

    def test_jacobians_of_a_layer_are_drawn(self):
        found = measure.jacobians(torch.nn.LSTM(2, 3, batch_first=True), torch.randn(2, 5, 2))
        ax = plot.spectrum(found)
        assert sum(len(dots.get_offsets()) for dots in ax.collections) == 2 * 5 * 6

    def test_of_many_steps_some_are_drawn_and_it_is_said(self):
        found = measure.jacobians(torch.nn.GRU(2, 3, batch_first=True), torch.randn(1, 200, 2))
        assert title(plot.spectrum(found)).endswith("every 4th of 200 steps")

    def test_padding_has_no_eigenvalues(self):
        values = torch.eye(2).expand(1, 3, 2, 2)
        found = SimpleNamespace(values=values, valid=torch.tensor([[True, False, False]]))
        (dots,) = plot.spectrum(found).collections
        assert len(dots.get_offsets()) == 2

    def test_exponents_are_drawn_about_zero(self):
        found = measure.lyapunov(torch.nn.GRU(2, 4, batch_first=True), torch.randn(2, 40, 2))
        ax = plot.spectrum(found)
        assert title(ax).startswith(f"largest exponent {float(found.exponents[0]):.3g}")
        assert ax.get_ylabel() == "growth per step (natural log)"

    def test_thousands_of_eigenvalues_are_thinned(self):
        assert title(plot.spectrum(ring(30_000))).endswith("every 2nd of 30,000 eigenvalues")


class TestSaturation:
    def test_few_units_have_a_bar_each_at_their_own_place(self):
        ax = plot.saturation(pressed(5))
        assert [bar.get_height() for bar in ax.patches] == pytest.approx(pressed(5).units.tolist())
        assert title(ax) == "30.4% saturated over all (dashed)"

    def test_many_units_are_sorted_and_the_axis_says_so(self):
        ax = plot.saturation(pressed(5000))
        assert ax.get_xlabel() == "5,000 units, most saturated first"

    def test_steps_that_no_row_reaches_leave_a_gap(self):
        result = pressed(5)
        result.steps[2] = torch.nan
        plot.saturation(result, by="step").get_figure().canvas.draw()

    def test_the_measure_itself_is_drawn(self):
        plot.saturation(measure.saturation(walk()))


class TestDistances:
    def test_pairs_of_steps_show_where_they_settle(self):
        ax = plot.distances(SimpleNamespace(distances=square(), settles_at=7))
        assert (ax.get_xlabel(), title(ax)) == ("step", "settles at step 7 (dashed)")

    def test_a_state_that_never_settles_has_no_line(self):
        assert not plot.distances(SimpleNamespace(distances=square(), settles_at=None)).lines

    def test_labels_stand_on_both_sides(self):
        ax = plot.distances(square(3), labels=["x", "y", "z"])
        assert (
            [t.get_text() for t in ax.get_xticklabels()] == [t.get_text() for t in ax.get_yticklabels()] == list("xyz")
        )

    def test_five_thousand_are_thinned_on_both_sides(self):
        ax = plot.distances(torch.zeros(5000, 5000))
        assert ax.get_xlabel() == ax.get_ylabel() == "row (every 13th of 5,000 rows)"
        assert ax.images[0].get_array().shape == (385, 385)


class TestTrajectories:
    def test_each_row_is_a_path_of_its_own_length(self):
        traj = Trajectory(waves(rows=2, steps=9), torch.tensor([9, 4]))
        lines = [c for c in plot.trajectories(traj).collections if hasattr(c, "get_segments")]
        assert [len(line.get_segments()) for line in lines] == [8, 3]

    def test_several_trajectories_share_one_plane(self):
        ax = plot.trajectories([waves(rows=2), walk()], labels=["a", "b", "c"])
        assert texts(ax) == ["  a", "  b", "  c"]

    def test_more_rows_than_can_be_told_apart_are_thinned(self):
        assert title(plot.trajectories(waves(rows=100))) == "every 5th of 100 rows"

    def test_a_row_of_one_step_is_a_point(self):
        plot.trajectories(waves(steps=1)).get_figure().canvas.draw()

    def test_three_components_need_depth(self):
        _, ax = pyplot.subplots()
        with pytest.raises(BadInput, match="3 components need a 3-D ax"):
            plot.trajectories(waves(), ax, components=3)
        assert plot.trajectories(waves(), components=3).name == "3d"


class TestFixedPoints:
    def test_stable_and_unstable_are_counted(self):
        legend = plot.fixed_points(corners()).get_legend()
        assert [text.get_text() for text in legend.get_texts()] == ["4 stable", "5 unstable"]

    def test_points_of_h_and_c_are_drawn_over_paths_of_h(self):
        result = SimpleNamespace(points=torch.randn(3, 8), stable=torch.tensor([True, False, True]))
        plot.fixed_points(result, traj=waves(units=4))

    def test_none_found_is_said(self):
        none = SimpleNamespace(points=torch.zeros(0, 3), stable=torch.zeros(0, dtype=torch.bool))
        assert title(plot.fixed_points(none)) == "no fixed points found"


class TestGatesAndAttention:
    def test_each_gate_has_a_line_and_the_candidate_none(self):
        assert [line.get_label() for line in plot.gates(walk()).lines] == ["input", "forget", "output"]
        assert [line.get_label() for line in plot.gates(walk(), names=["candidate"]).lines] == ["candidate"]

    def test_weights_of_thousands_of_steps_are_averaged_and_it_is_said(self):
        ax = plot.attention(torch.full((5000,), 1 / 5000))
        assert ax.get_xlabel() == "step (means of 7 of 5,000 steps)"
        assert plot.attention(torch.ones(3, 5000)).get_xlabel() == "step (means of 7 of 5,000 steps)"


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: plot.memory(3), "a result of measure.memory, but this is int"),
        (lambda: plot.spectrum("x"), "measure.jacobians, lyapunov or fixed_points, or a tensor .* but this is str"),
        (lambda: plot.saturation(walk()), "a result of measure.saturation, but this is Trajectory"),
        (lambda: plot.saturation(pressed(3), by="row"), "by is 'unit' or 'step', but is 'row'"),
        (lambda: plot.distances(torch.zeros(2, 3)), r"distances are \(n, n\).* but this is \(2, 3\)"),
        (lambda: plot.distances(square(3), labels=["a"]), "1 labels, but 3 steps"),
        (lambda: plot.fixed_points(walk()), "a result of measure.fixed_points, but this is Trajectory"),
        (lambda: plot.fixed_points(corners(), traj=waves()), "have 2 coordinates, but the trajectory has 6 units"),
        (lambda: plot.trajectories(waves(), components=4), "in 2 or 3 components, but 4"),
        (lambda: plot.trajectories(waves(), labels=["a", "b"]), "2 labels, but 1 rows"),
        (lambda: plot.trajectories([waves(), waves(units=3)]), r"the same units, but these have \[3, 6\]"),
        (lambda: plot.trajectories(waves(rows=0)), "no row with a step in it"),
        (lambda: plot.gates(waves()), "from a trajectory, but this is Tensor"),
        (lambda: plot.gates(Trajectory(waves())), r"no gates: record it with hs.record\(model, gates=True\)"),
        (lambda: plot.gates(walk(), names=["reset"]), "no gate named 'reset' in this trajectory, only input, forget"),
        (lambda: plot.attention(torch.zeros(2, 3, 4)), r"but this is \(2, 3, 4\). Of \(batch, head, time\) choose"),
        (lambda: plot.attention(torch.zeros(2, 3), labels=["a"]), "1 labels, but 2 rows"),
    ],
)
def test_what_is_no_result_is_refused_by_name(call, message):
    with pytest.raises(BadInput, match=message):
        call()
