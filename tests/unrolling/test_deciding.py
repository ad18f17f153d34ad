"""When a schedule is made, and from how many steps on it is taken."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import hiddenstate as hs
from hiddenstate.unrolling import cache, deciding, scheduled
from hiddenstate.unrolling.deciding import EngineDecision, LoopTime, Pace, decide

seconds = st.floats(1e-6, 1e-2)


@given(loop=st.tuples(seconds, seconds), ours=st.tuples(seconds, seconds), steps=st.integers(1, 2_000))
def test_the_faster_way_is_taken_for_any_number_of_steps(loop, ours, steps):
    def taken(way, count):
        return way[0] + way[1] * count

    paces = [Pace(64, taken(way, 1), taken(way, 64)) for way in (loop, ours)]
    decision = decide(*paces)
    if paces[0].several <= paces[1].several:
        assert decision.fewest is None
    elif steps > 64 or abs(taken(loop, steps) - taken(ours, steps)) > 1e-9:
        assert decision.takes(steps) == (taken(ours, steps) < taken(loop, steps)) or steps > 64


def test_calls_with_a_backward_pass_count_for_both():
    time = LoopTime()
    time.add(1.0, 10, grad=False)
    time.add(1.0, 10, grad=True)
    assert (time.seconds, time.steps, time.calls) == (4.0, 20, 2)


def test_a_schedule_is_due_when_the_loop_has_cost_as_much_as_the_last_one_took_to_make(monkeypatch):
    monkeypatch.setattr(deciding, "_BUILDING", {"cpu": 0.4})
    monkeypatch.setattr(deciding, "_LOADING", 0.0)
    deciding.built("cpu", 3.0)
    time = LoopTime(seconds=2.9)
    assert not time.is_due("cpu")
    time.add(0.1, 1, grad=False)
    assert time.is_due("cpu")
    deciding.built("cpu", 30.0)  # what was due stays so, however long it took then
    assert time.is_due("cpu")
    time.wait(10)
    time.add(299.0, 1, grad=False)
    assert not time.is_due("cpu")
    time.add(1.0, 1, grad=False)
    assert time.is_due("cpu")


def test_where_runs_have_to_be_the_same_steps_are_counted():
    torch.use_deterministic_algorithms(True)
    try:
        assert not LoopTime(seconds=1e9, steps=999).is_due("cpu")
        assert LoopTime(seconds=0.0, steps=1_000).is_due("cpu")
    finally:
        torch.use_deterministic_algorithms(False)


class Clock:
    """A clock that only tests move."""

    def __init__(self, monkeypatch):
        self.now = 0.0
        for module in (scheduled, deciding):
            monkeypatch.setattr(module, "clock", lambda: self.now)
        monkeypatch.setattr(deciding, "_BUILDING", {"cpu": 1.0})
        monkeypatch.setattr(deciding, "_LOADING", 0.0)
        plain = scheduled.run_loop
        self.loops = 0

        def looped(layer, task):
            self.now, self.loops = self.now + 0.2, self.loops + 1
            return plain(layer, task)

        monkeypatch.setattr(scheduled, "run_loop", looped)


def engines_of(clock, cell, xs):
    """Which calls ran step by step."""
    found = []
    for x in xs:
        before = clock.loops
        out, _ = hs.unroll(cell, x)
        torch.testing.assert_close(out, hs.unroll(cell, x, engine="loop")[0])
        found.append(clock.loops > before)
    return found


def test_auto_moves_on_when_the_loop_has_cost_as_much_and_says_so(monkeypatch):
    clock, cell, x = Clock(monkeypatch), nn.GRUCell(3, 4), torch.randn(2, 5, 3)
    monkeypatch.setattr(cache, "decide", lambda *paces: EngineDecision(1, "it is faster"))
    assert "until that has cost as much" in hs.explain(cell, x).auto
    # Each call costs 0.2 seconds, and twice as much in the backward pass.
    assert engines_of(clock, cell, [x] * 4) == [True, True, False, False]
    assert hs.explain(cell, x).auto == "by the schedule from 1 steps on, decided after 2 calls: it is faster"
    assert "auto: by the schedule" in str(hs.explain(cell, x))


def test_a_schedule_that_took_longer_to_make_than_expected_is_used_all_the_same(monkeypatch):
    clock, cell, x = Clock(monkeypatch), nn.GRUCell(3, 4), torch.randn(2, 5, 3)
    monkeypatch.setattr(cache, "decide", lambda *paces: EngineDecision(1, ""))
    build = cache.build

    def slowly(run):
        clock.now += 100
        return build(run)

    monkeypatch.setattr(cache, "build", slowly)
    assert engines_of(clock, cell, [x] * 5) == [True, True, False, False, False]


def test_auto_stays_in_the_loop_where_a_schedule_is_no_faster(monkeypatch):
    clock, cell, x = Clock(monkeypatch), nn.GRUCell(3, 4), torch.randn(2, 5, 3)
    monkeypatch.setattr(cache, "decide", lambda *paces: EngineDecision(None, "it is slower"))
    assert engines_of(clock, cell, [x] * 5) == [True] * 5
    assert "a schedule is no faster (it is slower)" in hs.explain(cell, x).auto


def test_short_calls_stay_in_the_loop_where_only_long_ones_gain(monkeypatch):
    clock, cell, x = Clock(monkeypatch), nn.GRUCell(3, 4), torch.randn(2, 5, 3)
    monkeypatch.setattr(cache, "decide", lambda *paces: EngineDecision(4, ""))
    engines_of(clock, cell, [x] * 3)
    assert engines_of(clock, cell, [x, x[:, :3], x[:, :4], x[:, :1]]) == [False, True, False, True]


def test_calls_for_which_the_loop_is_faster_do_not_even_read_the_cell(monkeypatch):
    clock, cell, x = Clock(monkeypatch), nn.GRUCell(3, 4), torch.randn(2, 5, 3)
    monkeypatch.setattr(cache, "decide", lambda *paces: EngineDecision(4, ""))
    engines_of(clock, cell, [x] * 3 + [x[:, :2]])
    monkeypatch.setattr(scheduled, "prepare", lambda *_: pytest.fail("the cell was read"))
    assert engines_of(clock, cell, [x[:, :3], x[:, :1]]) == [True, True]


def test_a_schedule_that_is_no_faster_is_thought_of_again_when_ten_times_as_much_was_spent():
    time = LoopTime(seconds=5.0, steps=7)
    time.wait(10)
    assert (time.seconds, time.steps, time.patience) == (0.0, 0, 10.0)
    time.wait(10)
    assert time.patience == 100.0


def test_the_pace_of_both_ways_is_measured_on_the_users_own_input_and_leaves_no_trace(monkeypatch):
    cell, x = nn.GRUCell(3, 4), torch.randn(2, 5, 3, requires_grad=True)
    seen, before = [], torch.get_rng_state()
    monkeypatch.setattr(cache, "decide", lambda *given: seen.extend(given[:2]) or decide(*given))
    monkeypatch.setattr(LoopTime, "is_due", lambda *_: True)
    hs.unroll(cell, x, lengths=[3, 5])
    assert [pace.steps for pace in seen] == [16, 16]
    assert all(pace.one > 0 and pace.several > 0 for pace in seen)
    assert x.grad is None
    assert all(parameter.grad is None for parameter in cell.parameters())
    assert torch.equal(torch.get_rng_state(), before)


def test_a_schedule_may_have_to_win_by_more_than_a_little():
    loop, schedule = Pace(16, 1.0, 16.0), Pace(16, 0.9, 14.0)
    assert decide(loop, schedule).fewest == 1
    assert decide(loop, schedule, 0.8).fewest is None


def test_one_switch_turns_the_fast_engine_off(monkeypatch):
    cell, x = nn.GRUCell(3, 4), torch.randn(2, 5, 3)
    monkeypatch.setenv("HIDDENSTATE_ENGINE", "loop")
    hs.unroll(cell, x, engine="fast")
    hs.Recurrent(nn.GRUCell, 3, 4, engine="fast")(x)
    assert hs.explain(cell, x).reason == "HIDDENSTATE_ENGINE is 'loop'"
    assert cell not in cache._cells
    monkeypatch.setenv("HIDDENSTATE_ENGINE", "fastest")
    with pytest.raises(hs.errors.BadInput, match=r"HIDDENSTATE_ENGINE is 'fastest', but 'loop' is needed"):
        hs.unroll(cell, x)


def test_what_one_thread_does_is_measured_without_what_the_processor_is_given_to_besides(monkeypatch):
    before = torch.get_num_threads()
    monkeypatch.setattr(deciding.time, "thread_time", iter([1.0, 1.5]).__next__)
    monkeypatch.setattr(deciding, "clock", iter([1.0, 9.0]).__next__)
    try:
        torch.set_num_threads(1)
        assert deciding.seconds_of(lambda: None) == 0.5
        torch.set_num_threads(2)
        assert deciding.seconds_of(lambda: None) == 8.0
    finally:
        torch.set_num_threads(before)
