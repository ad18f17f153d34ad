"""A cell need not say how large its state is: every tool takes it as it takes the same cell with a `hidden_size`."""

from __future__ import annotations

import re
import warnings
from contextlib import nullcontext
from tempfile import TemporaryDirectory

import pytest
import torch
from torch import nn

import hiddenstate as hs
from hiddenstate import testing
from hiddenstate.errors import HiddenStateError
from tests.support.unsized import SPREAD, STYLES, UNITS, made, sequence, sized
from tests.support.untouched import untouched

every_style = pytest.mark.parametrize("style", STYLES)


def start_of(style, rows):
    zeros = torch.zeros(rows, UNITS)
    return (zeros, zeros) if "Lstm" in style else zeros


def stepped(cell, x, style, *, drop=False):
    """Step a cell along a sequence as a script does."""
    state, last = start_of(style, len(x)), None
    for t in range(x.shape[1]):
        last = cell(x[:, t], *state) if style in SPREAD else cell(x[:, t], state)
        if not drop:
            state = last[1] if style in ("WithOutput", "LstmWithOutput", "Normed") else last
    return last


def said(tool, cell, x, style):
    """Return what a tool says of a cell, or how it refuses."""
    try:
        return tool(cell, x, style)
    except HiddenStateError as error:
        return type(error), str(error)


def recorded(cell, x, style):
    with hs.record(cell) as rec:
        stepped(cell, x, style)
    return [(track, name, part) for track in rec for run in rec.runs(track) for name, part in run.states.items()]


def monitored(cell, x, style):
    optimizer = torch.optim.SGD(cell.parameters(), 0.1)
    with hs.Monitor(cell, optimizer, every=1) as monitor:
        for _ in range(2):
            out = stepped(cell, x, style, drop=True)
            optimizer.zero_grad()
            sum(part.sum() for part in (out if isinstance(out, tuple) else (out,)) if torch.is_tensor(part)).backward()
            optimizer.step()
    return [(each.finding.code, each.finding.where) for each in monitor.findings]


def penalized(cell, x, style):
    with hs.regularize.Penalty(cell, temporal=1.0, activity=1.0) as penalty:
        stepped(cell, x, style)
        return penalty()


def equations(cell, x, style):
    kind = "lstm" if "Lstm" in style else "gru" if style == "Gru" else "rnn"
    return testing.check_equations(cell, kind) is None


def reported(cell, x, style):
    with TemporaryDirectory() as folder:
        page = hs.report(cell, x, path=f"{folder}/report.html").read_text()
    return sorted(set(re.findall(r"HS\d\d\d", page))), "l0" in page


TOOLS = {
    "layers": lambda cell, x, style: str(hs.layers(cell)),
    "diagnose": lambda cell, x, style: hs.diagnose(cell, x).codes,
    "diagnose without input": lambda cell, x, style: hs.diagnose(cell).codes,
    "diagnose one step": lambda cell, x, style: hs.diagnose(cell, x[:, 0]).codes,
    "memory": lambda cell, x, style: hs.measure.memory(cell, x).length,
    "contributions": lambda cell, x, style: hs.measure.contributions(cell, x).memory,
    "unroll": lambda cell, x, style: hs.unroll(cell, x)[0],
    "statistics": lambda cell, x, style: hs.measure.statistics(hs.measure.runs_of(cell, [x])).count,
    "compare": lambda cell, x, style: hs.measure.compare(model=cell, inputs=list(x)).distances,
    "tbptt": lambda cell, x, style: list(hs.tbptt(cell, x, x, lambda out, y: out, k1=3)),
    "survey": lambda cell, x, style: hs.measure.survey(cell, [x]).steps,
    "check_split": lambda cell, x, style: bool(hs.check_split(cell, x)),
    "record": recorded,
    "Monitor": monitored,
    "Penalty": penalized,
    "check_equations": equations,
    "check_cell": lambda cell, x, style: testing.check_cell(cell),
    "report": reported,
}


@pytest.mark.sample(100)
@every_style
@pytest.mark.parametrize("tool", TOOLS)
def test_it_is_taken_as_the_same_cell_that_says_its_size(tool, style):
    if (tool, style) == ("check_equations", "Tokens"):
        pytest.skip("the equations are those of numbers")
    cell, x = made(style), sequence(style)
    twin = sized(cell)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with untouched(cell) if tool != "Monitor" else nullcontext():
            found = said(TOOLS[tool], cell, x, style)
        expected = said(TOOLS[tool], twin, x, style)
    torch.testing.assert_close(found, expected) if torch.is_tensor(expected) else None
    assert torch.is_tensor(expected) or str(found) == str(expected)


@pytest.mark.parametrize("form", ["h", "pair", "output and pair"])
def test_a_stack_of_such_cells_runs_as_one_of_cells_that_say_their_size(form):
    class Own(nn.Module):
        def __init__(self, n_in, n_hid):
            super().__init__()
            self.gates = nn.Linear(n_in + n_hid, 4 * n_hid)

        def forward(self, x, state):
            h, c = (state, state) if form == "h" else state
            i, f, g, o = self.gates(torch.cat([x, h], -1)).chunk(4, -1)
            c = f.sigmoid() * c + i.sigmoid() * g.tanh()
            h = o.sigmoid() * c.tanh()
            return h if form == "h" else (h, c) if form == "pair" else (h, (h, c))

    class Sized(Own):
        def __init__(self, n_in, n_hid):
            super().__init__(n_in, n_hid)
            self.hidden_size = n_hid

    stack, twin = hs.Recurrent(Own, 3, 6, num_layers=2), hs.Recurrent(Sized, 3, 6, num_layers=2)
    twin.load_state_dict(stack.state_dict())
    x = torch.randn(4, 7, 3)
    torch.testing.assert_close(stack(x)[0], twin(x)[0])
    with hs.record(stack) as rec, hs.record(twin) as expected:
        stack(x), twin(x)
    for track in expected:
        torch.testing.assert_close(rec[track].h, expected[track].h)
    with pytest.raises(hs.errors.BadInput, match=r"that is made already was given.*give the class"):
        hs.Recurrent(Own(3, 6), 3, 6)


@every_style
def test_a_cell_handed_a_state_by_a_script_is_diagnosed_as_it_is_alone(style):
    cell, x = made(style), sequence(style)
    state = start_of(style, len(x))
    given = state if style in SPREAD else (state,)
    assert hs.diagnose(cell, x[:, 0], *given).codes == hs.diagnose(sized(cell), x[:, 0], *given).codes == ()
