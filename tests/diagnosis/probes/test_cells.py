"""Single cells: what one step follows, how far a state goes when driven, and how a loop hands states on."""

import pytest
import torch
from torch import nn

from hiddenstate.diagnosis.probes.cells import CellDrives, CellTrials, SteppedCells
from tests.support.admitted import admitted

X = torch.randn(5, 7, 3)


class Cell(nn.Module):
    """A step that may leave something out."""

    input_size, hidden_size = 3, 4

    def __init__(self, *, see=1.0, remember=1.0, squash=torch.tanh, cut=False):
        super().__init__()
        self.inner, self.recurrent = nn.Linear(3, 4), nn.Linear(4, 4)
        self.see, self.remember, self.squash, self.cut = see, remember, squash, cut

    def forward(self, x, h):
        h = h.detach() if self.cut else h
        return self.squash(self.see * self.inner(x) + self.remember * self.recurrent(h))


class Loop(nn.Module):
    """Steps a cell along time; `hand_on` says what the next step is given."""

    def __init__(self, cell, hand_on=lambda first, h: h):
        super().__init__()
        self.cell, self.hand_on = cell, hand_on

    def forward(self, x):
        first = h = x.new_zeros(len(x), 4)
        outs = []
        for step in x.unbind(1):
            h = self.cell(step, self.hand_on(first, h))
            outs.append(h)
        return torch.stack(outs, 1)


@pytest.mark.parametrize(("see", "remember"), [(1.0, 1.0), (0.0, 1.0), (1.0, 0.0)])
def test_a_step_follows_what_it_uses(see, remember):
    with admitted(Loop(Cell(see=see, remember=remember)), X) as patient:
        (trial,) = patient[CellTrials]
        assert trial.name == "cell"
        assert (trial.by_input > 0) == (see > 0)
        assert (trial.by_part["h"] > 0) == (remember > 0)
        assert trial.cut == ""


def test_a_state_that_moves_the_next_one_and_gets_no_gradient_is_cut():
    with admitted(Loop(Cell(cut=True)), X) as patient:
        (trial,) = patient[CellTrials]
        assert "part 'h' of the state moves the next one" in trial.cut
        assert "its gradient is exactly 0" in trial.cut or "its gradient is missing" in trial.cut


def test_torchs_own_layers_are_not_tried():
    with admitted(nn.GRU(3, 4, batch_first=True), X) as patient:
        assert patient[CellTrials] == ()


@pytest.mark.parametrize(("squash", "bounded"), [(torch.tanh, True), (torch.relu, False)])
def test_a_cell_is_driven_to_the_bounds_of_its_state(squash, bounded):
    with admitted(Loop(Cell(squash=squash)), X) as patient:
        (drive,) = patient[CellDrives]
        assert (drive.bounds["h"] <= 1) == bounded
        assert len(drive.traces) == len(drive.states) == len(drive.results) == 3
        assert all(trace.named(squash.__name__) for trace in drive.traces)


def test_every_step_of_a_loop_is_kept_and_handed_on_whole():
    with admitted(Loop(Cell()), X) as patient:
        ((name, steps),) = patient[SteppedCells].items()
        assert (name, len(steps.calls), steps.parts) == ("cell", 7, ["h"])
        assert (steps.starts_anew, steps.constant_parts(), steps.detached()) == (False, [], 0)


def test_a_loop_that_never_hands_its_state_on_is_seen():
    with admitted(Loop(Cell(), lambda first, h: first), X) as patient:
        assert patient[SteppedCells]["cell"].constant_parts() == ["h"]


def test_a_loop_that_cuts_the_graph_between_steps_is_seen():
    with admitted(Loop(Cell(), lambda first, h: h.detach()), X) as patient:
        assert patient[SteppedCells]["cell"].detached() == 6
