"""Pictures as plotly takes them: the data in them are the values, thinned only where it is said."""

import json
import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hiddenstate import measure
from hiddenstate.plot import project
from hiddenstate.recording import Trajectory
from hiddenstate.reporting import figures
from tests.plot.gallery import fading, pressed, walk, waves


def as_json(figure):
    """A figure has to survive strict JSON: no NaN, no tensors."""
    return json.loads(json.dumps(figure, allow_nan=False))


@given(values=st.lists(st.floats(width=32), max_size=5), digits=st.integers(1, 7))
def test_numbers_are_rounded_and_what_is_not_finite_is_none(values, digits):
    found = figures.numbers(torch.tensor(values, dtype=torch.float64), digits)
    assert found == [float(f"{value:.{digits}g}") if math.isfinite(value) else None for value in values]


def test_a_heatmap_has_a_line_for_each_unit_and_a_column_for_each_step():
    h = waves(steps=5, units=3)[0]
    figure, note = figures.heatmap(h, part="h", tokens=None, every=10, cells=1000)
    (trace,) = as_json(figure)["data"]
    torch.testing.assert_close(torch.tensor(trace["z"]), h.T, rtol=5e-3, atol=1e-3)
    assert (trace["x"], trace["y"], note) == ([0, 10, 20, 30, 40], [0, 1, 2], "")
    assert trace["zmin"] == -trace["zmax"]  # zero is in the middle of the colors


def test_a_heatmap_of_a_gate_runs_from_shut_to_open():
    figure, _ = figures.heatmap(torch.rand(5, 3), part="forget", tokens=None, every=1, cells=1000)
    assert (figure["data"][0]["zmin"], figure["data"][0]["zmax"]) == (0, 1)
    assert figure["data"][0]["colorscale"] == "@@sequential"


@given(steps=st.integers(1, 3000), units=st.integers(1, 600))
def test_a_heatmap_keeps_to_its_cells_and_says_so(steps, units):
    figure, note = figures.heatmap(torch.zeros(steps, units), part="h", tokens=None, every=1, cells=20_000)
    trace = figure["data"][0]
    shown = len(trace["y"]) * len(trace["x"])
    assert shown <= max(20_000, 24 * 48) * 1.05
    assert bool(note) == (shown < steps * units)


def test_a_heatmap_has_gaps_where_values_are_not_finite():
    h = waves(steps=4, units=2)[0].clone()
    h[1, 1] = torch.nan
    figure, _ = figures.heatmap(h, part="h", tokens=None, every=1, cells=1000)
    assert as_json(figure)["data"][0]["z"][1][1] is None


def test_tokens_name_the_steps_each_with_its_number():
    figure, _ = figures.heatmap(torch.zeros(3, 2), part="h", tokens=["a", "a", "<b"], every=1, cells=1000)
    assert figure["data"][0]["x"] == ["0 · a", "1 · a", "2 · &lt;b"]
    assert figure["layout"]["xaxis"]["ticktext"] == ["a", "a", "&lt;b"]


def test_of_many_tokens_plotly_chooses_which_to_write():
    figure, _ = figures.heatmap(torch.zeros(50, 2), part="h", tokens=["x"] * 50, every=1, cells=1000)
    assert figure["layout"]["xaxis"]["type"] == "category"
    assert "ticktext" not in figure["layout"]["xaxis"]


def test_gates_are_medians_within_bands_and_the_candidate_is_none():
    traj = walk()
    figure = as_json(figures.gates(traj, 0, None))
    lines = {trace["name"]: trace["y"] for trace in figure["data"] if "name" in trace}
    assert list(lines) == ["input", "forget", "output"]
    expected = traj.gates["forget"][0].quantile(0.5, dim=1)
    torch.testing.assert_close(torch.tensor(lines["forget"]), expected, rtol=1e-3, atol=1e-4)
    assert len(figure["data"]) == 9


def test_the_memory_curve_is_drawn_with_its_threshold_and_length():
    result = fading()
    figure = as_json(figures.memory(result))
    assert figure["data"][2]["y"] == pytest.approx(result.curve.tolist(), rel=1e-3)
    level, length = figure["layout"]["shapes"]
    assert level["y0"] == level["y1"] == pytest.approx(0.01)
    assert length["x0"] == length["x1"] == result.length - 1


def test_a_memory_that_ends_is_drawn_as_far_as_it_can_be_seen():
    result = fading()
    result.curve[12:] = 0
    result = replace(result, low=result.curve, high=result.curve)
    low, high = as_json(figures.memory(result))["layout"]["xaxis"]["range"]
    assert low < 0 < 11 < high < 12


def test_few_units_keep_their_places_and_many_are_sorted_by_saturation():
    few = as_json(figures.saturation(pressed(5)))["data"][0]
    assert few["y"] == pytest.approx(pressed(5).units.tolist(), rel=1e-3)
    assert few["customdata"] == list(range(5))
    many = as_json(figures.saturation(pressed(600)))
    assert many["data"][0]["y"] == sorted(many["data"][0]["y"], reverse=True)
    assert many["data"][0]["customdata"][0] == 599
    assert many["layout"]["xaxis"]["title"]["text"] == "units, most saturated first"


def test_distances_keep_their_names_and_are_thinned_on_both_sides():
    square = torch.arange(9.0).reshape(3, 3)
    figure, note = figures.distances(square, ["a", "b", "c"], "row")
    assert as_json(figure)["data"][0]["z"] == square.tolist()
    assert (figure["data"][0]["x"], note) == (["a", "b", "c"], "")
    figure, note = figures.distances(torch.zeros(500, 500), [str(row) for row in range(500)], "step")
    assert figure["data"][0]["y"] == [str(row) for row in range(0, 500, 3)]
    assert len(figure["data"][0]["z"]) == len(figure["data"][0]["z"][0]) == 167
    assert note == "every 3rd of 500 steps"


def test_paths_go_through_the_projections_of_their_states():
    h = waves(rows=2, steps=6)
    traj = Trajectory(h, torch.tensor([6, 4]), every=2)
    figure, explained, note = figures.paths(traj, ["a", "b"], [])
    plane = project(torch.cat([h[0], h[1, :4]]))
    first, second = as_json(figure)["data"]
    torch.testing.assert_close(torch.tensor([first["x"], first["y"]]).T, plane(h[0]), rtol=1e-3, atol=1e-3)
    assert second["marker"]["color"] == [0, 2, 4, 6]  # every second step was recorded
    assert second["marker"]["symbol"] == ["circle-open", "circle", "circle", "square"]
    assert [end["text"] for end in figure["layout"]["annotations"]] == ["a", "b"]
    torch.testing.assert_close(explained, plane.explained)
    assert note == ""


def test_of_many_rows_some_paths_are_drawn_and_it_is_said():
    figure, _, note = figures.paths(Trajectory(waves(rows=30)), [str(row) for row in range(30)], [])
    assert len(figure["data"]) <= 12
    assert note == "every 3rd of 30 rows"


def test_the_spectrum_holds_each_eigenvalue_once_inside_or_outside():
    found = measure.jacobians(torch.nn.GRU(2, 3, batch_first=True), torch.randn(1, 4, 2))
    inside, outside = as_json(figures.spectrum(found))["data"]
    assert len(inside["x"]) + len(outside["x"]) == 12
    assert all(modulus <= 1 for modulus in inside["customdata"])
    assert all(modulus > 1 for modulus in outside["customdata"])


def test_what_users_write_is_shown_and_not_read():
    assert figures.escape("a<b> & %{x}") == "a&lt;b> &amp; %\u200b{x}"


def test_paths_that_jump_are_points_colored_by_their_commonest_tokens():
    traj = Trajectory(torch.randn(2, 60, 5))
    tokens = [list("aab" * 20), list("cde" * 20)]
    figure, _, note = figures.paths(traj, ["one", "two"], tokens)
    named = {trace["name"]: trace for trace in as_json(figure)["data"]}
    assert set(named) == {"a", "b", "c", "d", "e", "others"}
    assert len(named["a"]["x"]) == 40
    assert named["others"]["x"] == []
    assert all(trace["mode"] == "markers" for trace in named.values())
    assert "points without lines" in note
    assert "colored by the token" in note


def test_paths_that_jump_without_tokens_are_points_colored_by_step():
    figure, _, note = figures.paths(Trajectory(torch.randn(2, 60, 5)), ["one", "two"], [])
    assert [trace["mode"] for trace in figure["data"]] == ["markers", "markers"]
    assert figure["data"][0]["marker"]["color"] == list(range(60))
    assert "points without lines" in note
