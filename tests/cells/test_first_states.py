"""What a cell begins with."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import hiddenstate as hs
from hiddenstate.cells.first_states import FIRST_STATES, candidates, own_start, units_of
from hiddenstate.errors import BadInput, NotRecurrent
from tests.support.cells import OutputLast
from tests.support.unsized import STYLES, UNITS, made, sequence


@pytest.mark.parametrize("name", [name for name in FIRST_STATES if name != "initial_state"])
def test_a_first_state_is_what_the_cell_makes_under_whatever_name(name):
    cell = made("Nothing")
    setattr(type(cell), name, lambda self, batch: torch.full((batch, UNITS), 0.25))
    try:
        assert torch.equal(hs.layers(cell)[0].initial(2)["h"], torch.full((2, UNITS), 0.25))
        assert own_start(cell) == name
    finally:
        delattr(type(cell), name)


def test_a_learned_start_keeps_its_graph():
    class Learned(STYLES["Nothing"]):  # type: ignore[name-defined]
        def __init__(self):
            super().__init__()
            self.h0 = nn.Parameter(torch.randn(UNITS))

        def init_hidden(self, batch):
            return self.h0.expand(batch, -1)

    cell = Learned()
    hs.unroll(cell, torch.randn(2, 3, 3))[0].sum().backward()
    assert cell.h0.grad is not None


@pytest.mark.parametrize("style", STYLES)
def test_the_size_is_among_those_that_are_tried(style):
    _, sizes = candidates(made(style), sequence(style)[:, 0])
    assert UNITS in sizes


def test_what_a_cell_says_counts_more_than_what_was_learned():
    cell = made("Nothing")
    assert units_of(cell) is None
    hs.layers(cell)
    assert units_of(cell) == UNITS
    cell.hidden_size = 9
    assert units_of(cell) == 9


def test_a_cell_whose_state_nobody_can_tell_is_refused_with_a_way_out():
    cell, x = OutputLast(), torch.randn(4, 12, 3)
    said = r"OutputLast has neither initial_state\(batch\) nor hidden_size, and no state of a size .* hand a state in"
    for tool in (hs.unroll, hs.measure.contributions):
        with pytest.raises(NotRecurrent, match=said):
            tool(cell, x)
    report = hs.diagnose(cell, x)
    assert not report.ok
    assert report.codes == ()
    assert "no state was given, and none could be handed in: OutputLast.forward needs 'h'" in report.text()
    assert "hs.diagnose(model, x, state)" in report.text()


def test_a_whole_sequence_is_never_handed_to_a_cell():
    cell, x = made("InitHidden"), torch.randn(5, 5, 3)  # as many rows as steps: its products would add up
    with pytest.raises(
        BadInput, match=r"takes one step and its state, but x of shape \(5, 5, 3\) is a sequence.*hs\.unroll"
    ):
        hs.cells.started(cell, x)
    assert hs.diagnose(cell, x).codes == ()
    assert hs.diagnose(made("OptionalState"), x).codes == ()
    assert hs.measure.memory(cell, x).length > 1
