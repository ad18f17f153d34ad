"""Strange steps along time: drawn is every score, the threshold, and what was known."""

import pytest
import torch

from hiddenstate import measure, plot
from hiddenstate.errors import BadInput
from tests.plot.gallery import strange, title


def line(ax, label):
    return next(line for line in ax.lines if label in str(line.get_label()))


def test_scores_flagged_steps_and_the_threshold_are_drawn():
    found = strange()
    ax = plot.novelty(found)
    torch.testing.assert_close(torch.tensor(ax.lines[0].get_ydata()), found.scores[0], equal_nan=True)
    flagged = found.flagged[0].nonzero().flatten()
    assert line(ax, "flagged").get_xdata().tolist() == flagged.tolist()
    assert line(ax, "flagged").get_label() == f"{len(flagged)} flagged"
    assert set(line(ax, "of seen states lie below").get_ydata()) == {found.threshold}
    assert ax.get_ylim()[0] == 0


@pytest.mark.parametrize("rows", [True, False])
def test_what_is_known_to_be_strange_is_shaded_in_one_piece_each(rows):
    truth = torch.zeros(120, dtype=torch.bool)
    truth[10:20] = truth[119] = True
    ax = plot.novelty(strange(), truth=truth.unsqueeze(0) if rows else truth.numpy())
    assert [(patch.get_x(), patch.get_width()) for patch in ax.patches] == [(9.5, 10), (118.5, 1)]


def test_a_log_scale_and_another_method_say_so():
    states = torch.randn(2, 30, 3)
    ax = plot.novelty(measure.novelty(states, states, method="nearest"), row=1, log=True)
    assert ax.get_yscale() == "log"
    assert title(ax) == "to the nearest of them"


def test_what_cannot_be_drawn_is_refused():
    with pytest.raises(BadInput, match="row 1 was asked for, but there are 1 rows"):
        plot.novelty(strange(), row=1)
    with pytest.raises(BadInput, match=r"truth has shape \(3,\), but \(1, 120\) is needed, or one row of it, \(120,\)"):
        plot.novelty(strange(), truth=[True, False, True])
