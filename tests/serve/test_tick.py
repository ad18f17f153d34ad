"""One tick: nothing moves before it is committed, and what others changed meanwhile is done again."""

import pytest
import torch
from torch import nn

from hiddenstate.errors import StoreFailed
from hiddenstate.serve.arena import Arena
from hiddenstate.serve.futures import ResultFuture
from hiddenstate.serve.policy import SessionPolicy
from hiddenstate.serve.queue import OperationQueue
from hiddenstate.serve.session_operations import LATER, Open, OutputRow, Push
from hiddenstate.serve.stores import MemoryStore
from hiddenstate.serve.tick import TickRunner
from hiddenstate.serve.trial import prepare


class Store(MemoryStore):
    """A store that fails, or is ahead of whoever reads it, when told to."""

    broken = False

    def advance(self, advances, changes):
        if self.broken:
            raise StoreFailed("the disk is full")
        return super().advance(advances, changes)


class Bench:
    """A tick runner with all that it needs, its operations run one by one."""

    def __init__(self, model) -> None:
        self.store, self.arena = Store(), Arena(model.initial(), 4)
        queue = OperationQueue(max_size=10, max_wait=0.0)
        policy = SessionPolicy(model, self.store, self.arena, max_stored=10)
        self.ticks = TickRunner(model, self.store, queue, arena=self.arena, policy=policy, clock=lambda: 100.0)
        self.run(Open("a", ResultFuture(1)))

    def run(self, op):
        self.ticks.run([op])
        return op.result

    def push(self, x):
        return self.run(Push("a", ResultFuture(1), x[None], steps=len(x), single_step=False, seq=None))

    def state(self):
        return self.arena.gather(self.arena.find(["a"]))["h"]


@pytest.fixture
def bench():
    served = prepare(nn.GRU(3, 4, batch_first=True))
    yield Bench(served)
    served.close()


def test_a_tick_commits_then_moves_the_arena_on(bench):
    assert isinstance(bench.push(torch.ones(2, 3)), OutputRow)
    entry, row = bench.arena.entry("a"), bench.store.read("a")
    assert (entry.seq, entry.steps) == (row.seq, row.steps) == (1, 2)
    assert row.state == bench.state().numpy().tobytes()


def test_where_the_commit_fails_the_session_is_as_the_store_has_it(bench):
    bench.push(torch.ones(2, 3))
    before = bench.store.read("a")
    bench.store.broken = True
    assert isinstance(bench.push(torch.ones(1, 3)), StoreFailed)
    assert not bench.arena.has("a")  # to be read from the store again
    assert bench.store.read("a") == before
    bench.store.broken = False
    bench.push(torch.ones(1, 3))
    assert bench.store.read("a").seq == 2


def test_work_on_a_session_that_somebody_else_changed_is_done_again(bench):
    bench.push(torch.ones(2, 3))
    bench.arena.table.token[bench.arena.find(["a"])] -= 1  # as if the store had moved on meanwhile
    push = Push("a", ResultFuture(1), torch.ones(1, 1, 3), steps=1, single_step=False, seq=None)
    assert bench.run(push) is LATER
    assert [op for op, _ in bench.ticks.delayed] == [push]
    assert bench.store.read("a").seq == 1
    assert isinstance(bench.push(torch.ones(1, 3)), OutputRow)
    assert bench.store.read("a").seq == 2
