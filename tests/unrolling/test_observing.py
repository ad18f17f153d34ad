"""Hooks that only look on: a cell runs by its schedule all the same, and they see every step in the plain loop."""

import pytest
import torch
from torch import nn

import hiddenstate as hs
from hiddenstate.unrolling import row_order, unseen


class Looking:
    """A hook that keeps what it sees."""

    def __init__(self, observes):
        self.observes = observes
        self.seen = []

    def __call__(self, module, args, result):
        if not unseen():
            self.seen.append((result, row_order()))


def run(cell, x, lengths=None):
    leaf = x.clone().requires_grad_()
    out, _ = hs.unroll(cell, leaf, lengths=lengths, engine="fast")
    out.sin().sum().backward()
    return out.detach(), leaf.grad


@pytest.mark.parametrize("lengths", [None, [2, 5, 3]], ids=str)
def test_observers_see_every_step_of_a_scheduled_run_which_stays_the_same(lengths):
    cell, x = nn.GRUCell(3, 4), torch.randn(3, 5, 3)
    lengths = None if lengths is None else torch.tensor(lengths)
    plain = run(cell, x, lengths)
    looking = Looking(observes=True)
    cell.register_forward_hook(looking)
    watched = run(cell, x, lengths)
    assert all(torch.equal(a, b) for a, b in zip(plain, watched, strict=True))
    assert len(looking.seen) == 5
    for t, (h, order) in enumerate(looking.seen):
        rows = torch.arange(3)[: len(h)] if order is None else order[: len(h)]
        torch.testing.assert_close(h.detach(), plain[0][rows, t])
        assert (order is None) == (lengths is None)


def test_a_hook_that_may_act_still_keeps_a_cell_from_its_schedule():
    cell = nn.GRUCell(3, 4)
    cell.register_forward_hook(Looking(observes=False))
    with pytest.raises(hs.errors.Untraceable, match="hooks on it want to see every step"):
        hs.unroll(cell, torch.randn(3, 5, 3), engine="fast")


def test_outside_an_unroll_rows_are_in_order_and_nothing_is_hidden():
    assert row_order() is None
    assert not unseen()
