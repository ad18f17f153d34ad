"""The plain loop takes any `Cell` whose state is a `State`; what users hand in becomes one."""

import pytest
import torch

import hiddenstate as hs
from hiddenstate.cells import as_layer
from hiddenstate.errors import NotRecurrent
from hiddenstate.unrolling.checks import Task
from hiddenstate.unrolling.loop import NamedCell, rows_first, run_loop, run_steps
from tests.support.cells import CELLS, TanhCell


class Counter:
    """Counts the steps of each row, and knows nothing of modules."""

    def initial_state(self, batch):
        return hs.State({"steps": torch.zeros(batch)})

    def __call__(self, x, state):
        after = hs.State({"steps": state["steps"] + x})
        return after["steps"], after


X = torch.ones(3, 5)


def test_every_step_is_counted_once():
    out, state = run_steps(Counter(), Task(X))
    assert out.tolist() == [[1, 2, 3, 4, 5]] * 3
    assert state["steps"].tolist() == [5, 5, 5]


def test_rows_end_at_their_lengths_in_any_order():
    out, state = run_steps(Counter(), Task(X, lengths=torch.tensor([2, 5, 1])))
    assert out.tolist() == [[1, 2, 0, 0, 0], [1, 2, 3, 4, 5], [1, 0, 0, 0, 0]]
    assert state["steps"].tolist() == [2, 5, 1]


def test_rows_start_anew_where_they_are_reset_from_what_is_asked_for():
    resets = torch.zeros(3, 5, dtype=torch.bool)
    resets[1, 3] = True
    assert run_steps(Counter(), Task(X, resets=resets))[1]["steps"].tolist() == [5, 2, 5]
    ten = Task(X, resets=resets, initial=lambda rows: hs.State({"steps": torch.full((rows,), 10.0)}))
    assert run_steps(Counter(), ten)[1]["steps"].tolist() == [15, 12, 15]


@pytest.mark.parametrize("sample", CELLS.values(), ids=CELLS)
def test_a_users_cell_becomes_one_with_named_parts(sample):
    cell, x = sample.cell(), sample.x()
    named = NamedCell(as_layer(cell, x[:, 0]))
    state = named.initial_state(3)
    out, after = named(x[:, 0], state)
    assert out.shape == (3, sample.output)
    assert tuple(state) == tuple(after) == sample.parts
    torch.testing.assert_close(run_loop(named.layer, Task(x[:, :1]))[0][:, 0], out)


def test_an_output_without_rows_is_refused_with_its_shape():
    layer, state = as_layer(TanhCell()), hs.State({"h": torch.zeros(2, 4)})
    with pytest.raises(NotRecurrent, match=r"TanhCell returned an output of shape \(3, 4\) for 2 rows"):
        rows_first(layer, torch.zeros(3, 4), state, 2)
    with pytest.raises(NotRecurrent, match=r"TanhCell returned an output that is dict for 2 rows.*torch\.cat"):
        rows_first(layer, {}, state, 2)
