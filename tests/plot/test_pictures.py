"""What holds for every picture: it goes where it is told, leaves everything else alone, and looks as it did."""

import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from matplotlib import pyplot
from matplotlib.testing.compare import compare_images
from torch import nn

from hiddenstate import measure, plot, record
from hiddenstate.errors import BadInput, MissingExtra
from tests.plot.gallery import (
    BASELINE,
    GALLERY,
    added,
    corners,
    draw,
    exponents,
    fading,
    knowing,
    pressed,
    ring,
    sentences,
    settling,
    square,
    strange,
    title,
    walk,
    waves,
)

TOLERANCE = 6.0  # root mean square of 255; another version of a font moves a letter, another picture much more

INTO_AX = {
    "heatmap": lambda ax: plot.heatmap(walk(), ax),
    "gates": lambda ax: plot.gates(walk(), ax),
    "trajectories": lambda ax: plot.trajectories(walk(rows=2), ax),
    "compare": lambda ax: plot.compare(sentences(), ax),
    "probe": lambda ax: plot.probe(knowing(), ax),
    "histogram": lambda ax: plot.histogram(walk(), ax),
    "distances": lambda ax: plot.distances(square(), ax),
    "memory": lambda ax: plot.memory(fading(), ax),
    "saturation": lambda ax: plot.saturation(pressed(9), ax),
    "spectrum": lambda ax: plot.spectrum(ring(), ax),
    "fixed_points": lambda ax: plot.fixed_points(corners(), ax),
    "novelty": lambda ax: plot.novelty(strange(), ax),
    "contributions": lambda ax: plot.contributions(added(), ax),
    "attention": lambda ax: plot.attention(waves()[0].T.softmax(1), ax),
}


@pytest.mark.parametrize("name", GALLERY)
def test_a_picture_looks_as_it_did(name, tmp_path):
    draw(name, tmp_path / f"{name}.png")
    difference = compare_images(str(BASELINE / f"{name}.png"), str(tmp_path / f"{name}.png"), tol=TOLERANCE)
    assert difference is None, f"{difference}\nIf this is meant: python -m tests.plot.gallery, and look at it"


def test_the_tolerance_tells_one_picture_from_another(tmp_path, monkeypatch):
    monkeypatch.setitem(GALLERY, "memory", lambda: plot.memory(fading(rate=0.7)))
    draw("memory", tmp_path / "memory.png")
    assert compare_images(str(BASELINE / "memory.png"), str(tmp_path / "memory.png"), tol=TOLERANCE) is not None


def test_every_picture_has_a_baseline_that_the_docs_show_and_is_tried_below():
    pictures = {name for name in plot.__all__ if "ax" in inspect.signature(getattr(plot, name)).parameters}
    assert set(INTO_AX) == pictures
    assert pictures <= set(GALLERY)
    page = (Path(__file__).parents[2] / "docs" / "plot.md").read_text(encoding="utf-8")
    assert set(re.findall(r"^### (\w+)$", page, re.MULTILINE)) == pictures
    assert [name for name in GALLERY if f"(assets/plots/{name}.png)" not in page] == []


def test_every_baseline_belongs_to_a_picture():
    assert {path.stem for path in BASELINE.glob("*.png")} == set(GALLERY)


@pytest.mark.parametrize("name", INTO_AX)
def test_a_picture_goes_into_the_ax_it_is_given_and_gives_it_back(name):
    figure, ax = pyplot.subplots()
    assert INTO_AX[name](ax) is ax
    assert pyplot.get_fignums() == [figure.number]
    assert ax.has_data()


@pytest.mark.parametrize("name", INTO_AX)
def test_without_an_ax_there_is_one_new_figure(name):
    ax = INTO_AX[name](None)
    assert pyplot.get_fignums() == [ax.get_figure().number]


@pytest.mark.parametrize("name", INTO_AX)
def test_a_picture_changes_no_setting_and_shows_nothing(name, monkeypatch):
    monkeypatch.setattr(pyplot, "show", lambda *_: pytest.fail("a window was opened"))
    before = dict(pyplot.rcParams)
    INTO_AX[name](None)
    assert dict(pyplot.rcParams) == before


def test_every_axis_is_labeled():
    for draw_into in INTO_AX.values():
        ax = draw_into(None)
        assert ax.get_xlabel()
        assert ax.get_ylabel()
        pyplot.close("all")


RESULTS = {
    "AttentionWeights": lambda: measure.AttentionWeights(torch.rand(1, 1, 3), "model.py:1", "softmax"),
    "Automaton": lambda: measure.automaton(waves(), [[0] * 17], 2),
    "Contributions": lambda: measure.contributions(torch.nn.RNN(1, 2), torch.randn(1, 3, 1)),
    "Comparison": sentences,
    "DeadUnits": lambda: measure.dead_units(waves()),
    "Dimension": lambda: measure.dimension(waves()),
    "FixedPoints": corners,
    "Jacobians": lambda: measure.jacobians(torch.nn.GRU(2, 3, batch_first=True), torch.randn(1, 4, 2)),
    "Lyapunov": lambda: exponents(torch.zeros(3), 0.0),
    "Memory": fading,
    "MemoryCapacity": lambda: measure.memory_capacity(torch.nn.RNN(1, 3, batch_first=True), torch.randn(1, 300, 1)),
    "Novelty": lambda: measure.novelty(waves(), waves(rows=3)),
    "Positions": settling,
    "Probe": knowing,
    "Saturation": lambda: pressed(4),
    "Statistics": lambda: measure.statistics(waves()),
    "Survey": lambda: measure.survey(torch.nn.GRU(2, 3, batch_first=True), [torch.randn(1, 4, 2)]),
}
TAKEN = {
    "attention": {"AttentionWeights"},
    "compare": {"Comparison"},
    "contributions": {"Contributions"},
    "distances": {"Comparison", "Positions"},
    "fixed_points": {"FixedPoints"},
    "histogram": {"Statistics"},
    "memory": {"Memory"},
    "novelty": {"Novelty"},
    "probe": {"Probe"},
    "saturation": {"Saturation"},
    "spectrum": {"FixedPoints", "Jacobians", "Lyapunov"},
}


@pytest.mark.parametrize("kind", RESULTS)
@pytest.mark.parametrize("name", INTO_AX)
def test_a_picture_is_drawn_of_its_own_measure_and_of_no_other(name, kind):
    result = RESULTS[kind]()
    assert type(result).__name__ == kind
    if kind in TAKEN.get(name, ()):
        assert getattr(plot, name)(result).has_data()
        return
    with pytest.raises(BadInput, match=rf"but this is {kind}"):
        getattr(plot, name)(result)


def test_every_result_of_a_measure_is_tried_above():
    assert set(RESULTS) == {name for name in measure.__all__ if not name.islower()}


def test_hs_plot_alone_loads_no_matplotlib():
    code = "import sys, hiddenstate as hs; hs.plot.heatmap; print('matplotlib' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_without_matplotlib_the_way_to_get_it_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.delitem(sys.modules, "matplotlib.pyplot", raising=False)
    with pytest.raises(MissingExtra, match=r"pip install 'hiddenstate\[plot\]'"):
        plot.heatmap(waves())


@pytest.mark.parametrize("draw", [plot.heatmap, plot.gates, plot.trajectories])
def test_a_recording_of_one_track_is_drawn_as_its_trajectory(draw):
    gru = nn.GRU(2, 4, batch_first=True)
    with record(gru, gates=True) as rec:
        gru(torch.randn(2, 6, 2))
    shown, expected = draw(rec), draw(rec["l0"])
    assert (title(shown), shown.get_xlabel()) == (title(expected), expected.get_xlabel())
    with pytest.raises(BadInput, match=r"by track \(l0, l1\), but this is about one: rec\['l0'\]"):
        draw({"l0": rec["l0"], "l1": rec["l0"]})
