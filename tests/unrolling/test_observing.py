"""Listeners that only look on: a cell runs by its schedule all the same, and they see every step in the plain loop."""

import pytest
import torch
from torch import nn

import hiddenstate as hs
from hiddenstate.cells import Listener, as_layer, listen
from hiddenstate.unrolling import places


class Looking(Listener):
    """Keeps what it sees."""

    def __init__(self, *, observes):
        self._observes = observes
        self.seen = []

    @property
    def observes(self):
        return self._observes

    def layer_call(self, call, proceed):
        done = proceed(call)
        self.seen.append((done.result, places()))
        return done


def run(cell, x, lengths=None):
    leaf = x.clone().requires_grad_()
    out, _ = hs.unroll(cell, leaf, lengths=lengths, engine="fast")
    out.sin().sum().backward()
    return out.detach(), leaf.grad


@pytest.mark.parametrize("lengths", [None, [2, 5, 3], [0, 5, 3]], ids=str)
def test_observers_see_every_step_of_a_scheduled_run_which_stays_the_same(lengths):
    cell, x = nn.GRUCell(3, 4), torch.randn(3, 5, 3)
    lengths = None if lengths is None else torch.tensor(lengths)
    plain = run(cell, x, lengths)
    looking = Looking(observes=True)
    handle = listen(cell, [as_layer(cell)], looking)
    watched = run(cell, x, lengths)
    handle.remove()
    assert all(torch.equal(a, b) for a, b in zip(plain, watched, strict=True))
    assert len(looking.seen) == 5
    for t, (h, where) in enumerate(looking.seen):
        rows = torch.arange(3)[: len(h)] if where is None else where.rows[: len(h)]
        torch.testing.assert_close(h.detach(), plain[0][rows, t])
        assert (where is None) == (lengths is None)
        assert where is None or (where.batch == 3 and not where.starts.any())


def test_a_listener_that_may_act_and_a_hook_keep_a_cell_from_its_schedule():
    cell, x = nn.GRUCell(3, 4), torch.randn(3, 5, 3)
    handle = listen(cell, [as_layer(cell)], Looking(observes=False))
    with pytest.raises(hs.errors.Untraceable, match="hooks on it want to see every step"):
        hs.unroll(cell, x, engine="fast")
    handle.remove()
    hs.unroll(cell, x, engine="fast")
    cell.register_forward_hook(lambda *_: None)
    with pytest.raises(hs.errors.Untraceable, match="hooks on it want to see every step"):
        hs.unroll(cell, x, engine="fast")


def test_outside_an_unroll_rows_are_as_the_user_gave_them():
    assert places() is None
