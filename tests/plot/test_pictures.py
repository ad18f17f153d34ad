"""What holds for every picture: it goes where it is told, leaves everything else alone, and looks as it did."""

import subprocess
import sys

import pytest
from matplotlib import pyplot
from matplotlib.testing.compare import compare_images

from hiddenstate import plot
from hiddenstate.errors import MissingExtra
from tests.plot.gallery import BASELINE, GALLERY, corners, draw, fading, pressed, ring, square, walk, waves

TOLERANCE = 6.0  # root mean square of 255; another version of a font moves a letter, another picture much more

INTO_AX = {
    "heatmap": lambda ax: plot.heatmap(walk(), ax),
    "gates": lambda ax: plot.gates(walk(), ax),
    "trajectories": lambda ax: plot.trajectories(walk(rows=2), ax),
    "distances": lambda ax: plot.distances(square(), ax),
    "memory": lambda ax: plot.memory(fading(), ax),
    "saturation": lambda ax: plot.saturation(pressed(9), ax),
    "spectrum": lambda ax: plot.spectrum(ring(), ax),
    "fixed_points": lambda ax: plot.fixed_points(corners(), ax),
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


def test_hs_plot_alone_loads_no_matplotlib():
    code = "import sys, hiddenstate as hs; hs.plot.heatmap; print('matplotlib' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_without_matplotlib_the_way_to_get_it_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.delitem(sys.modules, "matplotlib.pyplot", raising=False)
    with pytest.raises(MissingExtra, match=r"pip install 'hiddenstate\[plot\]'"):
        plot.heatmap(waves())
