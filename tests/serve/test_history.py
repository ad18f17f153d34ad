"""Random callers and faults, by seed: all that callers see is explained by sessions run one operation at a time."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.chaos import EngineFleet, ServerFleet, closing, drive
from tests.support.history import UNKNOWN, Action, Event, Rules, explain
from tests.support.redis import RedisServer, needed

_SECONDS = 12.0  # of each run; benchmarks/chaos_serve.py goes on for as long as one likes


# The checker itself.


def told(*actions: Action) -> list[Event]:
    """The true history of actions that came one after the other."""
    rules, family, events = Rules(), (), []
    for place, action in enumerate(actions):
        family, answer = rules.apply(family, action)
        events.append(Event(action, 2.0 * place, 2.0 * place + 1, answer))
    return events


def push(seq: int | None = None, session: str = "a") -> Action:
    return Action("push", session, x=torch.randn(2, 3), seq=seq)


@given(st.randoms(use_true_random=False), st.floats(0, 8))
@settings(max_examples=40, deadline=None)
def test_what_happened_one_after_the_other_is_explained_however_it_overlaps(chance, stretch):
    kinds = ["push", "push", "push", "reset", "close", "open", "fork", "info", "export"]
    actions = [Action("open", "a")]
    for _ in range(15):
        kind, name = chance.choice(kinds), chance.choice("ab")
        seq = chance.choice([None, 1, 2, 3])
        actions.append(
            Action(kind, name, x=torch.randn(1, 3), seq=seq, target=chance.choice("ab"))
            if kind in ("push", "fork")
            else Action(kind, name)
        )
    events = told(*actions)
    for event in events:
        event.began -= stretch * chance.random()
        event.ended += stretch * chance.random()
    chance.shuffle(events)
    assert explain(events) > len(actions)


def test_an_acknowledged_input_that_is_lost_cannot_be_explained():
    events = told(Action("open", "a"), push(), push(), push())
    with pytest.raises(
        AssertionError, match=r"(?s)no order of 3 events.*a: input 1, 2 steps.*nothing fits.*push a #next"
    ):
        explain([events[0], events[1], events[3]])


def test_an_input_that_is_applied_twice_cannot_be_explained():
    one = push()
    events = told(Action("open", "a"), one, one, push())
    with pytest.raises(AssertionError, match="no order of 3 events"):
        explain([events[0], events[1], events[3]])


def test_a_number_that_counts_an_input_twice_cannot_be_explained():
    events = told(Action("open", "a"), push(1), Action("info", "a"))
    events[2].outcome = (2, 4)
    with pytest.raises(AssertionError, match=r"info a: \(2, 4\)\n *would have been \(1, 2\)"):
        explain(events)


def test_an_answer_that_is_older_than_what_was_answered_before_cannot_be_explained():
    opened, first, before, second, after = told(
        Action("open", "a"), push(), Action("info", "a"), push(), Action("info", "a")
    )
    after.outcome = before.outcome
    with pytest.raises(AssertionError, match="info a"):
        explain([opened, first, second, after])
    after.began = second.began  # while the second input is under way, either is true
    explain([opened, first, second, after])


def test_another_input_may_be_answered_by_the_one_that_had_its_number():
    events = told(Action("open", "a"), push(1), push(1))
    assert torch.equal(events[1].outcome, events[2].outcome)
    explain(events)


@pytest.mark.parametrize("took_place", [False, True])
def test_what_may_have_taken_place_may_stand_there_or_not(took_place):
    opened, maybe, last = told(Action("open", "a"), push(), push())
    maybe.outcome = UNKNOWN
    if not took_place:
        opened, last = told(Action("open", "a"), last.action)
    explain([opened, maybe, last])


def test_what_is_over_cannot_take_place_later_but_what_is_not_over_can():
    opened, first, late, last = told(Action("open", "a"), push(), push(), push())
    late.outcome, late.began, late.ended = UNKNOWN, 0.5, 0.6
    with pytest.raises(AssertionError, match="nothing fits"):
        explain([opened, first, late, last])
    late.ended = math.inf
    explain([opened, first, late, last])


def test_a_store_that_is_set_back_explains_what_came_after_its_copy_and_nothing_else():
    opened, first, copied, second = told(Action("open", "a"), push(1), Action("copy", ""), push(2))
    *_, back, info = told(
        *(event.action for event in (opened, first, copied, second)), Action("set back", ""), Action("info", "a")
    )
    assert info.outcome == (1, 2)
    explain([opened, first, copied, second, back, info])
    with pytest.raises(AssertionError, match="nothing fits"):
        explain([opened, first, copied, second, info])
    info.outcome = (0, 0)
    with pytest.raises(AssertionError, match="nothing fits"):
        explain([opened, first, copied, second, back, info])


# What is served.


@pytest.mark.parametrize("kind", ["memory", "sqlite"])
def test_a_short_run_of_callers_and_faults_is_explained(kind, tmp_path):
    """Of what the long ones do: a second or so, until each fault has come."""
    address = {"memory": "memory:", "sqlite": f"sqlite:///{tmp_path}/sessions.db"}[kind]
    with closing(EngineFleet(address)) as fleet:
        report = drive(fleet, seed=1, seconds=1.0)
    assert report.outcomes["push"] > report.outcomes["-> lost"]
    assert kind == "memory" or report.faults["the file is set back"]


@pytest.mark.long
def test_engines_on_a_disk_that_fills_up_give_nothing_that_cannot_be_explained(small_disk):
    with closing(EngineFleet(f"sqlite:///{small_disk}/sessions.db", disk=small_disk)) as fleet:
        report = drive(fleet, seed=0, seconds=_SECONDS)
    assert report.faults["the disk is full"]


@pytest.mark.long
@pytest.mark.parametrize(
    ("kind", "engines"),
    [("memory", 1), ("sqlite", 1), ("sqlite", 2), pytest.param("redis", 2, marks=[pytest.mark.redis, needed])],
)
def test_engines_on_a_store_that_fails_give_nothing_that_cannot_be_explained(kind, engines, tmp_path):
    address = {"memory": "memory:", "sqlite": f"sqlite:///{tmp_path}/sessions.db"}.get(kind)
    server = RedisServer(tmp_path) if kind == "redis" else None
    try:
        with closing(EngineFleet(address or server.address(lease=0.1), engines=engines)) as fleet:
            report = drive(fleet, seed=0, seconds=_SECONDS)
    finally:
        if server is not None:
            server.stop()
    assert report.outcomes["push"] > report.outcomes["-> lost"]


@pytest.mark.long
@pytest.mark.parametrize(
    ("kind", "workers"), [("sqlite", 1), pytest.param("redis", 2, marks=[pytest.mark.redis, needed])]
)
def test_servers_that_are_killed_and_paused_give_nothing_that_cannot_be_explained(kind, workers, tmp_path):
    server = RedisServer(tmp_path) if kind == "redis" else None
    address = f"sqlite:///{tmp_path}/sessions.db" if server is None else server.address(lease=0.2)
    try:
        with closing(ServerFleet(address, workers=workers, redis=server)) as fleet:
            report = drive(fleet, seed=0, seconds=2 * _SECONDS)
    finally:
        if server is not None:
            server.stop()
    assert report.outcomes["push"] > report.outcomes["-> lost"]
