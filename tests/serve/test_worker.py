"""Whoever runs a tick: when it is interrupted, nobody is left waiting; what was counted is what was done."""

import time
import uuid

import pytest
import torch
from torch import Tensor

from hiddenstate.errors import ServeError
from hiddenstate.serve import Engine
from hiddenstate.serve.futures import ResultFuture
from hiddenstate.serve.session_operations import Open, Push, PushChain, PushMany
from hiddenstate.serve.worker import TickCounter
from tests.support.models import Deep

CLOSE = {"rtol": 1e-5, "atol": 1e-6}


class Interrupted(Deep):
    """A model in which somebody presses Ctrl-C."""

    error: type[BaseException] | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.error is not None:
            raise self.error
        return super().forward(x)


def test_an_interrupted_tick_leaves_nobody_waiting(address):
    model, x = Interrupted(), torch.randn(3, 3)
    with torch.no_grad():
        wanted = model(x[None])[0]
    with Engine(model, address) as engine:
        names = [engine.open(uuid.uuid4().hex) for _ in range(2)]
        engine.push_many(names, torch.stack([x[0], x[0]]))
        for ask in (lambda: engine.push(names[0], x[1], 2), lambda: engine.push_many(names, torch.stack([x[1], x[1]]))):
            model.error = KeyboardInterrupt
            with pytest.raises((KeyboardInterrupt, ServeError)):
                ask()
            model.error = None
        assert engine.pending == 0
        for name in names:
            torch.testing.assert_close(engine.push(name, x[1], 2), wanted[1], **CLOSE)
            torch.testing.assert_close(engine.push(name, x[2], 3), wanted[2], **CLOSE)


def test_a_model_that_exits_in_the_engines_own_thread_does_not_end_it():
    model = Interrupted()
    with Engine(model) as engine:
        session = engine.open()
        model.error = SystemExit
        with pytest.raises(ServeError, match="was interrupted within a tick"):
            engine.push(session, torch.randn(3), timeout=10)
        model.error = None
        engine.push(session, torch.randn(3), 1, timeout=10)


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
    assert (now.ticks, now.inputs, now.steps, now.failures) == (2, 6, 3 + 4 + 8 + 1, 1)
    assert now.batch == (7 + 1) / 2  # seven operations in the first tick, one in the second
    assert now.latency_p99 > 0


def test_before_the_first_tick_all_is_zero():
    now = TickCounter().snapshot()
    assert (now.ticks, now.batch, now.tick_seconds, now.latency_p50) == (0, 0.0, 0.0, 0.0)
