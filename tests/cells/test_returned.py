"""Where the next state stands in what a step returns: alone, behind the output, or before it."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import hiddenstate as hs
from hiddenstate import regularize
from hiddenstate.cells.returned import state_before_output
from hiddenstate.testing import check_cell

UNITS = 4


class Step(nn.Module):
    """All of them compute the same, and nothing but names tells the state from an output that is as wide."""

    def __init__(self):
        super().__init__()
        self.hidden_size = UNITS
        self.wx, self.wh, self.fc = nn.Linear(3, UNITS), nn.Linear(UNITS, UNITS), nn.Linear(UNITS, UNITS)

    def next(self, x, h):
        return torch.tanh(self.wx(x) + self.wh(h))


class StateAndY(Step):
    def forward(self, x, h):
        h = self.next(x, h)
        y = self.fc(h)
        return h, y


class AsInCourses(Step):
    def forward(self, xt, a_prev):
        a_next = self.next(xt, a_prev)
        yt_pred = torch.softmax(self.fc(a_next), dim=1)
        return a_next, yt_pred


class HeadOnTheSpot(Step):
    def forward(self, x, hidden):
        new = self.next(x, hidden)
        return new, self.fc(new).sigmoid()


class StateArgument(Step):
    def forward(self, x, state):
        if x.shape[0] == 0:
            return state, torch.zeros_like(state)
        state = self.next(x, state)
        output = self.fc(state)
        return state, output


class OutputAndState(Step):
    def forward(self, x, h):
        h = self.next(x, h)
        y = self.fc(h)
        return y, h


class Masked(Step):
    def forward(self, x, h):
        new = self.next(x, h)
        return new, 0.5 * new + 0.5 * h


class Jordan(Step):
    def forward(self, x, y):
        h = self.next(x, y)
        y = self.fc(h)
        return h, y


class Twice(Step):
    def forward(self, x, h):
        h = self.next(x, h)
        return h, h.clone()


class NewState(Step):
    def forward(self, x, h):
        out = self.next(x, h)
        return out, self.fc(out)


FIRST = [StateAndY, AsInCourses, HeadOnTheSpot]
BEHIND = [OutputAndState, Masked, Jordan, Twice, NewState]
PLACES = [(kind, 0) for kind in FIRST] + [(kind, 1) for kind in BEHIND]


def by_hand(cell, x, place):
    state, states = torch.zeros(len(x), UNITS), []
    for step in x.unbind(1):
        state = cell(step, state)[place]
        states.append(state)
    return torch.stack(states, dim=1)


@pytest.mark.parametrize(("kind", "place"), PLACES)
def test_what_is_handed_on_is_what_the_code_means_by_its_state(kind, place):
    cell, x = kind(), torch.randn(2, 5, 3)
    states = by_hand(cell, x, place)
    outputs, last = hs.unroll(cell, x)
    torch.testing.assert_close(last["h"], states[:, -1])
    assert outputs.shape == (2, 5, UNITS)
    check_cell(cell, x)


@pytest.mark.parametrize("engine", ["loop", "fast"])
@pytest.mark.parametrize("kind", FIRST)
def test_every_engine_gives_the_output_behind_it(kind, engine):
    cell, x = kind(), torch.randn(2, 5, 3)
    states = by_hand(cell, x, 0)
    before = [torch.zeros(2, UNITS), *states.unbind(1)[:-1]]
    expected = [cell(step, state)[1] for step, state in zip(x.unbind(1), before, strict=True)]
    outputs, _ = hs.unroll(cell, x, engine=engine)
    torch.testing.assert_close(outputs, torch.stack(expected, dim=1))


@pytest.mark.parametrize(("kind", "place"), PLACES)
def test_a_loop_that_hands_it_on_is_one_run(kind, place):
    cell, x = kind(), torch.randn(2, 5, 3)
    with hs.record(cell) as rec:
        states = by_hand(cell, x, place)
    (track,) = rec
    torch.testing.assert_close(rec[track].h, states)


@pytest.mark.parametrize(("kind", "place"), [(StateAndY, 0), (HeadOnTheSpot, 0), (OutputAndState, 1)])
def test_a_penalty_is_on_the_state(kind, place):
    cell, x = kind(), torch.randn(2, 5, 3)
    with regularize.Penalty(cell, temporal=1.0) as penalty:
        states = by_hand(cell, x, place)
        cost = penalty()
    torch.testing.assert_close(cost, (states[:, 1:] - states[:, :-1]).square().mean())


@pytest.mark.parametrize(("kind", "place"), [(StateAndY, 0), (HeadOnTheSpot, 0), (OutputAndState, 1)])
def test_zoneout_mixes_the_state(kind, place):
    cell, x, kept = kind(), torch.randn(2, 5, 3), torch.zeros(2, UNITS)
    for step in x.unbind(1):
        kept = 0.25 * kept + 0.75 * cell(step, kept)[place]
    _, last = hs.unroll(regularize.Zoneout(cell, 0.25).eval(), x)
    torch.testing.assert_close(last["h"], kept)


class SeveralAndY(Step):
    def __init__(self):
        super().__init__()
        self.gates = nn.Linear(3 + UNITS, 4 * UNITS)

    def forward(self, x, h, c):
        i, f, g, o = self.gates(torch.cat([x, h], dim=1)).chunk(4, dim=1)
        c = f.sigmoid() * c + i.sigmoid() * g.tanh()
        h = o.sigmoid() * c.tanh()
        y = self.fc(h)
        return h, c, y


class PairAndY(SeveralAndY):
    def forward(self, x, state):
        h, c, y = super().forward(x, *state)
        return (h, c), y


@pytest.mark.parametrize("kind", [SeveralAndY, PairAndY])
def test_a_state_of_two_parts_may_stand_before_the_output_too(kind):
    cell, x = kind(), torch.randn(2, 5, 3)
    h = c = torch.zeros(2, UNITS)
    for step in x.unbind(1):
        h, c, y = SeveralAndY.forward(cell, step, h, c)
    outputs, last = hs.unroll(cell, x)
    for found, expected in ((last["h"], h), (last["c"], c), (outputs[:, -1], y)):
        torch.testing.assert_close(found, expected)


def test_one_return_that_says_otherwise_leaves_the_state_behind():
    assert not state_before_output(StateArgument())
    assert not state_before_output(nn.GRUCell(3, UNITS))
