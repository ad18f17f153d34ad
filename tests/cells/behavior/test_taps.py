"""Taps read what a trace would: the same states, or nothing at all."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from hiddenstate.cells.behavior.analysis import analyze
from hiddenstate.cells.behavior.model_call import ModelCall
from hiddenstate.cells.behavior.taps import LoopTaps, TapPlan, plan_of

B, H = 2, 4


class Elman(nn.Module):
    """A loop whose states are kept aside; `start` makes the first one."""

    def __init__(self, start=lambda model, x: x.new_zeros(len(x), H)) -> None:
        super().__init__()
        self.mix, self.first = nn.Linear(2 + H, H), nn.Parameter(torch.randn(B, H))
        self.start, self.states, self.scale, self.after = start, [], 1.0, 0

    def forward(self, x):
        h = self.start(self, x)
        self.states = [h]
        for step in x.unbind(1):
            h = torch.tanh(self.mix(torch.cat([step, h], 1)))
            if self.scale != 1.0:
                h = h * self.scale
            self.states.append(h)
        for _ in range(self.after):
            h = h.exp()
        return h


class Twice(nn.Module):
    """Two loops of the same code, one on the other."""

    def __init__(self) -> None:
        super().__init__()
        self.low, self.high = Elman(), Elman()
        self.high.mix = nn.Linear(2 * H, H)

    def forward(self, x):
        self.low(x)
        return self.high(torch.stack(self.low.states[1:], 1))


def traced(model: nn.Module, x: torch.Tensor, taps: LoopTaps | None = None) -> tuple[TapPlan | None, Any]:
    """The plan that one traced call gives, and its candidates."""
    inputs = ((x,), {})
    trace, _ = ModelCall(model, inputs, set(), again=model.forward).real(lambda: model.forward(x), taps)
    candidates = analyze(trace).candidates
    return plan_of(trace, candidates, inputs), candidates


def proven(model: nn.Module, steps: int = 5) -> TapPlan | None:
    """The plan that two traced calls agree on."""
    plan, _ = traced(model, torch.randn(B, steps, 2))
    if plan is None:
        return None
    taps = LoopTaps(plan.sites)
    again, candidates = traced(model, torch.randn(B, steps, 2), taps)
    return plan.proven(again, taps, candidates)


def read(plan: TapPlan, model: nn.Module, x: torch.Tensor) -> Any:
    """What taps read of one more call, which is not traced."""
    taps = LoopTaps(plan.sites)
    taps.around(lambda: model(x))
    return plan.read(taps, ((x,), {}))


STARTS = {
    "zeros": lambda model, x: x.new_zeros(len(x), H),
    "a parameter": lambda model, x: model.first,
    "made of the input": lambda model, x: torch.cat([x[:, 0], x[:, 1]], 1),
}


@pytest.mark.parametrize("start", STARTS.values(), ids=STARTS)
@given(steps=st.integers(2, 8))
def test_the_states_of_a_later_call_are_read_whatever_its_length(start, steps):
    model = Elman(start)
    plan = proven(model)
    assert plan is not None
    ((part, values, first),) = read(plan, model, torch.randn(B, steps, 2))
    assert part.name == "h"
    assert first is model.states[0]
    assert len(values) == steps
    assert all(value is state for value, state in zip(values, model.states[1:], strict=True))  # with its graph


def test_loops_of_the_same_code_are_told_apart():
    model = Twice()
    plan = proven(model)
    assert plan is not None
    for steps in (3, 7):
        found = read(plan, model, torch.randn(B, steps, 2))
        for (_, values, first), inner in zip(found, (model.low, model.high), strict=True):
            assert first is inner.states[0]
            assert all(value is state for value, state in zip(values, inner.states[1:], strict=True))


def test_a_loop_may_start_from_what_another_of_the_same_code_ended_in():
    model = Twice()
    model.high.start = lambda _, x: model.low.states[-1]
    plan = proven(model)
    assert plan is not None
    for steps in (3, 7, 4):
        (_, _, first), (_, _, second) = read(plan, model, torch.randn(B, steps, 2))
        assert first is model.low.states[0]
        assert second is model.low.states[-1]


def test_a_place_that_also_makes_something_else_is_not_tapped():
    class Shared(Elman):
        def next(self, step, h):
            return torch.tanh(self.mix(torch.cat([step, h], 1)))

        def forward(self, x):
            aside, h = self.next(x[:, 0], x.new_ones(len(x), H)), x.new_zeros(len(x), H)
            for step in x.unbind(1):
                h = self.next(step, h)
            return h + aside

    assert proven(Shared()) is None


def changed_scale(model):
    model.scale = 0.5


def changed_after(model):
    model.after = 2


def changed_start(model):
    model.start = lambda model, x: x.new_ones(len(x), H) * 2


CHANGES = {"within the turns": changed_scale, "after the loop": changed_after, "before the loop": changed_start}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_call_that_does_anything_else_is_not_read(change):
    model = Elman()
    plan = proven(model)
    assert plan is not None
    change(model)
    assert read(plan, model, torch.randn(B, 5, 2)) is None


def test_a_plan_that_a_second_call_does_not_show_is_not_proven():
    model = Elman()
    plan, _ = traced(model, torch.randn(B, 5, 2))
    assert plan is not None
    assert plan.runs == ()
    taps = LoopTaps(plan.sites)
    model.scale = 0.5
    again, candidates = traced(model, torch.randn(B, 5, 2), taps)
    assert plan.proven(again, taps, candidates) is None
    assert plan.proven(None, taps, candidates) is None


def test_a_state_that_is_written_in_place_is_not_tapped():
    class Written(Elman):
        def forward(self, x):
            h = x.new_zeros(len(x), H)
            for step in x.unbind(1):
                h.copy_(torch.tanh(self.mix(torch.cat([step, h], 1))))
            return h

    with torch.no_grad():
        assert traced(Written(), torch.randn(B, 5, 2))[0] is None


def test_our_own_work_and_other_threads_are_not_heard():
    model = Elman()
    plan = proven(model)
    assert plan is not None
    taps, x = LoopTaps(plan.sites), torch.randn(B, 5, 2)

    def work():
        taps.ours = True
        model(x)
        taps.ours = False
        thread = threading.Thread(target=model, args=(x,))
        thread.start()
        thread.join()

    taps.around(work)
    assert (taps.seen, taps.since) == ([], 0)
