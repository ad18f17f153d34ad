"""Input against memory: both lines, of one row without its padding."""

import pytest
import torch
from torch import nn

from hiddenstate import measure, plot
from hiddenstate.errors import BadInput
from tests.plot.gallery import added, title


def test_both_sizes_are_drawn_without_the_padding():
    found = measure.contributions(nn.LSTM(2, 4, batch_first=True), torch.randn(2, 6, 2), lengths=torch.tensor([6, 4]))
    ax = plot.contributions(found, row=1)
    for drawn, sizes in zip(ax.lines, (found.input, found.memory), strict=True):
        torch.testing.assert_close(torch.tensor(drawn.get_ydata()), sizes[1, :4])
    assert title(ax) == f"memory has {float(found.share[1, :4].mean()):.0%}"
    gate = plot.contributions(found, gate="forget")
    torch.testing.assert_close(torch.tensor(gate.lines[1].get_ydata()), found.gates["forget"].memory[0])
    assert title(gate).startswith("forget: memory has")


def test_by_ablation_the_axis_says_what_was_taken_away():
    found = measure.Contributions(torch.ones(1, 3), torch.ones(1, 3), "ablation")
    assert plot.contributions(found).get_ylabel() == "move of the state without it"


def test_tokens_stand_under_their_steps():
    ax = plot.contributions(added(), tokens=["a"] * 17)
    assert [text.get_text() for text in ax.get_xticklabels()] == ["a"] * 17


def test_what_cannot_be_drawn_is_refused():
    with pytest.raises(BadInput, match="there is no gate 'forget': this layer has none"):
        plot.contributions(added(), gate="forget")
    with pytest.raises(BadInput, match="row 3 was asked for, but there are 1 rows"):
        plot.contributions(added(), row=3)
    with pytest.raises(BadInput, match="there are 2 tokens, but 17 steps"):
        plot.contributions(added(), tokens=["a", "b"])
