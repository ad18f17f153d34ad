"""Numbers of an engine: what was counted is what was done."""

import time

import torch

from hiddenstate.errors import ServeError
from hiddenstate.serve.session_operations import Open, Push, PushChain, PushMany, ResultFuture
from hiddenstate.serve.stats import TickCounter


def push(steps: int) -> Push:
    return Push("a", ResultFuture(1), torch.zeros(1, steps, 2), steps=steps, single_step=False, seq=None)


def test_every_kind_of_input_is_counted_once():
    counter = TickCounter()
    many = PushMany(["b", "c"], ResultFuture(2), torch.zeros(2, 4, 2), single_step=False, seqs=None)
    failed, opened = push(1), Open("d", ResultFuture(1))
    failed.result = ServeError("no")
    counter.count([push(3), PushChain([push(2), push(2)]), many, failed, opened], [opened.future], time.perf_counter())
    counter.count([push(1)], [], time.perf_counter())
    now = counter.snapshot()
    assert (now.ticks, now.inputs, now.steps, now.failures) == (2, 7, 3 + 4 + 8 + 1 + 1, 1)
    assert now.batch == (7 + 1) / 2  # seven operations in the first tick, one in the second
    assert now.latency_p99 > 0


def test_before_the_first_tick_all_is_zero():
    now = TickCounter().snapshot()
    assert (now.ticks, now.batch, now.tick_seconds, now.latency_p50) == (0, 0.0, 0.0, 0.0)
