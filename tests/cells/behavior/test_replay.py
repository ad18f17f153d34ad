"""The replay law can fail: a wrong cut is refused, whichever way it is wrong."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from hiddenstate.cells.behavior import find
from hiddenstate.cells.behavior.analysis import analyze
from hiddenstate.cells.behavior.replay import Law

from .noting import run

B, T, H = 3, 7, 4


class Loop(nn.Module):
    """Two parts that need each other, in a loop."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(2 * H, H), nn.Linear(2 * H, H)

    def forward(self, x):
        h, m = torch.zeros(len(x), H), torch.ones(len(x), H)
        for t in range(x.shape[1]):
            h, m = torch.tanh(self.a(torch.cat([x[:, t], m], 1)) + h), torch.sin(self.b(torch.cat([h, m], 1)))
        return h + m


class Apart(Loop):
    """The second part does not depend on the first one."""

    def forward(self, x):
        h, m = torch.zeros(len(x), H), torch.ones(len(x), H)
        for t in range(x.shape[1]):
            h, m = torch.tanh(self.a(torch.cat([h, m], 1))), torch.sin(self.b(torch.cat([x[:, t], m], 1)))
        return h


class Cell(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gates = nn.Linear(2 * H, 4 * H)

    def forward(self, x, state):
        h, c = state
        i, f, g, o = self.gates(torch.cat([x, h], 1)).chunk(4, 1)
        c = f.sigmoid() * c + i.sigmoid() * g.tanh()
        return o.sigmoid() * c.tanh(), c


class Stepped(nn.Module):
    """The same as calls of a module, whose state is masked on the way."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = Cell()

    def forward(self, x):
        state = (torch.zeros(len(x), H), torch.zeros(len(x), H))
        for t in range(x.shape[1]):
            keep = (x[:, t, :1] > -1).float()
            state = tuple(keep * new for new in self.cell(x[:, t], state))
        return state[0]


def candidate_of(model):
    torch.manual_seed(0)
    trace, _ = run(model, (torch.randn(B, T, H),), {})
    analysis = analyze(trace)
    (candidate,) = analysis.candidates
    return analysis, candidate


MODELS = [Loop, Apart, Stepped]


@pytest.mark.parametrize("make", MODELS)
def test_the_right_cut_is_kept(make):
    law = Law(*candidate_of(make()))
    assert law.broken() == ""
    assert law.idle() == []


@pytest.mark.parametrize("part", [0, 1])
@pytest.mark.parametrize("make", MODELS)
def test_a_cut_without_one_of_its_parts_is_refused(make, part):
    analysis, candidate = candidate_of(make())
    if make is Apart and part == 0:
        pytest.skip("the rest is a recurrence of its own")
    del candidate.drafts[part]
    if candidate.chain is not None:  # what the finder itself noted of that part must not help
        place = list(candidate.chain.parts)[part]
        gone = {value.number for value in candidate.chain.values(place)}
        gone.update(*(link.path for link in candidate.chain.parts[place]))
        candidate.chain.on_the_way -= gone
        analysis.covered -= gone
    assert "none of the found parts" in Law(analysis, candidate).broken()


@pytest.mark.parametrize("turn", range(T - 1))
@pytest.mark.parametrize("make", MODELS)
def test_a_cut_with_two_parts_swapped_at_one_turn_is_refused(make, turn):
    analysis, candidate = candidate_of(make())
    one, other = candidate.drafts
    one.values[turn], other.values[turn] = other.values[turn], one.values[turn]
    assert Law(analysis, candidate).broken() != ""


@pytest.mark.parametrize("turn", range(1, T))
@pytest.mark.parametrize("part", [0, 1])
@pytest.mark.parametrize("make", MODELS)
def test_a_value_of_the_turn_before_is_refused(make, part, turn):
    analysis, candidate = candidate_of(make())
    values = candidate.drafts[part].values
    values[turn] = values[turn - 1]
    assert Law(analysis, candidate).broken() != ""


@pytest.mark.parametrize("make", MODELS)
def test_a_trajectory_that_is_one_turn_late_is_refused(make):
    analysis, candidate = candidate_of(make())
    for draft in candidate.drafts:
        draft.values = [draft.initial, *draft.values[:-1]]
    assert Law(analysis, candidate).broken() != ""


@pytest.mark.parametrize("make", MODELS)
def test_other_numbers_than_it_gave_are_refused(make):
    analysis, candidate = candidate_of(make())
    candidate.drafts[0].values[T // 2].copy = torch.full((B, H), 7.0)
    assert "gives something else" in Law(analysis, candidate).broken()


def test_a_part_that_never_matters_is_dropped():
    class Idle(Loop):
        def forward(self, x):
            h, m = torch.zeros(len(x), H), torch.ones(len(x), H)
            for t in range(x.shape[1]):
                h = torch.tanh(self.a(torch.cat([x[:, t], h], 1)) + 0 * m)
                m = torch.sin(self.b(torch.cat([x[:, t], x[:, t]], 1)) + 0 * m)
            return h

    found = find(Idle(), (torch.randn(B, T, H),))
    (loop,) = found.recurrences
    assert [part.name for part in loop.parts] == ["h"]
    assert "m crosses, but whatever it holds, nothing else comes out" in found.explain()


def test_dropout_on_the_way_does_not_hide_that_a_part_matters():
    class Dropped(Loop):
        def forward(self, x):
            h = torch.zeros(len(x), H)
            for t in range(x.shape[1]):
                h = nn.functional.dropout(torch.tanh(self.a(torch.cat([x[:, t], h], 1))), 0.5)
            return h

    (loop,) = find(Dropped(), (torch.randn(B, T, H),)).recurrences
    assert [part.name for part in loop.parts] == ["h"]
