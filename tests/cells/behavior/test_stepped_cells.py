"""Chains of calls as candidates: cells in time, iterations, and modules that only look like cells."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from hiddenstate.cells.behavior.analysis import analyze
from hiddenstate.cells.behavior.stepped_cells import chain_windows, no_cells

from .noting import run

B, T, H = 3, 5, 4


class Cell(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(2 * H, H)

    def forward(self, inputs, hidden):
        return torch.tanh(self.mix(torch.cat([inputs, hidden], 1)))


class Outer(nn.Module):
    """A cell that is made of another."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = Cell()

    def forward(self, inputs, hidden):
        return self.cell(inputs, hidden)


class Model(nn.Module):
    def __init__(self, function, cell=Cell) -> None:
        super().__init__()
        self.function, self.cell = function, cell()

    def forward(self, x):
        return self.function(self, x)


def stepped(m, x):
    state = x.new_zeros(len(x), H)
    for step in x.unbind(1):
        state = m.cell(step, state)
    return state


def iterated(m, x):
    state, first = x.new_zeros(len(x), H), x[:, 0]
    for _ in range(T):
        state = m.cell(first, state)
    return state


def nameless(m, x):
    kept = [x.new_zeros(len(x), H)]
    for step in x.unbind(1):
        kept = [m.cell(step, kept[0])]
    return kept[0]


def analyzed(function, cell=Cell, steps=T):
    with torch.no_grad():
        trace, _ = run(Model(function, cell), (torch.randn(B, steps, H),), {})
    return analyze(trace)


@pytest.mark.parametrize(("function", "kind"), [(stepped, "cell"), (iterated, "iteration")])
def test_a_piece_of_the_input_for_each_call_makes_a_cell_and_none_an_iteration(function, kind):
    (candidate,) = analyzed(function).candidates
    assert (candidate.kind, candidate.module) == (kind, "cell")
    (draft,) = candidate.drafts
    assert (draft.name, draft.argument, draft.result) == ("state", ("args", 1), ())
    assert len(draft.values) == T
    assert f"called {T} times" in candidate.evidence[0]


def test_where_the_code_has_no_name_for_a_part_the_module_has():
    (candidate,) = analyzed(nameless).candidates
    assert [draft.name for draft in candidate.drafts] == ["hidden"]


def test_of_modules_in_modules_the_innermost_is_the_cell():
    (candidate,) = analyzed(stepped, Outer).candidates
    assert candidate.module == "cell.cell"


def test_two_calls_decide_nothing():
    analysis = analyzed(stepped, steps=2)
    assert analysis.candidates == []
    assert any("only two repetitions" in str(each) for each in analysis.unsure)


def test_each_call_is_a_repetition_with_what_was_prepared_for_it():
    analysis = analyzed(stepped)
    (chain,) = [chain for chain in analysis.chains if isinstance(chain.module, Cell)]
    windows = chain_windows(analysis.trace, chain)
    assert windows.count == T
    for turn, call in enumerate(chain.calls):
        start, end = windows.span(turn)
        assert start <= call.start < call.end <= end


class Same(nn.Module):
    def forward(self, inputs, hidden):
        return inputs * 2, hidden


def once(m, x):
    return m.cell(x[:, 0], x[:, 1].exp())


def as_it_was(m, x):
    return m.cell(x[:, 0], torch.zeros(B, H))[0]


@pytest.mark.parametrize(
    ("function", "cell", "why"),
    [
        (once, Cell, "called once, with something made of the input as hidden"),
        (as_it_was, Same, "hidden comes back as it went in"),
    ],
)
def test_a_module_that_only_bears_the_names_of_a_cell_is_named(function, cell, why):
    (found,) = no_cells(analyzed(function, cell))
    assert found.module == "cell"
    assert why in found.why


def test_a_module_that_is_stepped_is_not_among_them():
    assert list(no_cells(analyzed(stepped))) == []
