"""Passes are recorded for lengths that come back, and for no others."""

import pytest
import torch

import hiddenstate as hs
from hiddenstate.unrolling.cache import _entries
from tests.support.cells import INPUT, PairCell

pytestmark = pytest.mark.cuda


def recorded(cell):
    (entry,) = _entries[cell].values()
    return [len(captures._known) for captures in entry.schedule.captures]


def both(cell, x):
    hs.unroll(cell, x, engine="fast")[0].sum().backward()


def test_lengths_that_change_are_not_recorded():
    cell = PairCell().cuda()
    for steps in range(1, 31):
        both(cell, torch.randn(3, steps, INPUT, device="cuda"))
    assert recorded(cell) == [0, 0]


def test_a_length_that_comes_back_is_recorded_and_gives_the_same():
    cell, x = PairCell().cuda(), torch.randn(3, 7, INPUT, device="cuda", requires_grad=True)
    grads = []
    for _ in range(5):
        out = hs.unroll(cell, x, engine="fast")[0]
        grads.append([out, *torch.autograd.grad(out.cos().sum(), [x, *cell.parameters()])])
    assert recorded(cell) == [1, 1]
    torch.testing.assert_close(grads[0], grads[-1], rtol=1e-4, atol=1e-5)


def test_no_more_than_a_few_recordings_are_kept():
    cell = PairCell().cuda()
    for steps in range(1, 8):
        for _ in range(4):
            both(cell, torch.randn(3, steps, INPUT, device="cuda"))
    assert recorded(cell) == [4, 4]


def test_weights_that_change_between_replays_are_seen():
    cell, x = PairCell().cuda(), torch.randn(3, 7, INPUT, device="cuda")
    with torch.no_grad():
        for _ in range(5):
            hs.unroll(cell, x, engine="fast")
        cell.gates.weight.mul_(2)
        out = hs.unroll(cell, x, engine="fast")[0]
        torch.testing.assert_close(out, hs.unroll(cell, x, engine="loop")[0], rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_memory_does_not_grow_over_many_shapes():
    cell = PairCell().cuda()

    def some(count):
        for number in range(count):
            both(cell, torch.randn(1 + number % 5, 1 + number % 17, INPUT, device="cuda"))
        torch.cuda.synchronize()
        return torch.cuda.memory_allocated()

    some(200)
    before = some(200)
    assert some(600) <= before + 2**20
