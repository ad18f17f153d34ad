"""How open the gates are: a line for the median of the units, a band for their middle half."""

import pytest
import torch

from hiddenstate import plot
from hiddenstate.errors import BadInput
from hiddenstate.recording import Trajectory
from tests.plot.gallery import title, walk, waves


def test_each_gate_has_a_line_and_the_candidate_none():
    assert [line.get_label() for line in plot.gates(walk()).lines] == ["input", "forget", "output"]
    assert [line.get_label() for line in plot.gates(walk(), names=["candidate"]).lines] == ["candidate"]


def test_a_line_is_the_median_and_its_band_the_middle_half():
    values = torch.rand(1, 5, 9)
    ax = plot.gates(Trajectory(torch.zeros(1, 5, 9), gates={"forget": values}))
    low, middle, high = (values[0].quantile(share, dim=1).tolist() for share in (0.25, 0.5, 0.75))
    assert ax.lines[0].get_ydata().tolist() == pytest.approx(middle)
    heights = ax.collections[0].get_paths()[0].vertices[:, 1].tolist()
    assert (min(heights), max(heights)) == pytest.approx((min(low), max(high)))


def test_padding_is_not_drawn_and_thinned_steps_keep_their_numbers():
    gates = {"update": torch.rand(2, 6, 3)}
    traj = Trajectory(torch.zeros(2, 6, 3), torch.tensor([6, 4]), gates=gates, every=10)
    assert plot.gates(traj, row=1).lines[0].get_xdata().tolist() == [0, 10, 20, 30]


def test_the_track_is_the_title_and_tokens_stand_under_their_steps():
    ax = plot.gates(walk(steps=3), tokens=["a", " ", "b"])
    assert title(ax) == "lstm.l0"
    assert [label.get_text() for label in ax.get_xticklabels()] == ["a", "␣", "b"]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: plot.gates(waves()), "from a trajectory, but this is Tensor"),
        (lambda: plot.gates(Trajectory(waves())), r"no gates: record it with hs.record\(model, gates=True\)"),
        (lambda: plot.gates(walk(), names=["reset"]), "no gate named 'reset' in this trajectory, only input, forget"),
    ],
)
def test_what_cannot_be_drawn_is_refused_by_name(call, message):
    with pytest.raises(BadInput, match=message):
        call()


def test_the_title_names_the_row_where_there_are_several():
    several = Trajectory(torch.zeros(2, 9, 4), gates={"forget": torch.rand(2, 9, 4)}, track="l0")
    assert title(plot.gates(several, row=1)) == "l0 · row 1"
