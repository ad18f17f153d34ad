"""The queue: order within a session, and nobody forgotten."""

import threading
import time

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hiddenstate.errors import Overloaded, ServeError
from hiddenstate.serve.futures import ResultFuture
from hiddenstate.serve.queue import OperationQueue
from hiddenstate.serve.session_operations import LATER, PENDING, ListNames, Push, PushChain, PushMany, SessionOperation


def ops(*sessions: str) -> list[SessionOperation]:
    return [SessionOperation(session, ResultFuture(1)) for session in sessions]


def make(max_size: int = 100, max_wait: float = 0.0) -> OperationQueue:
    return OperationQueue(max_size=max_size, max_wait=max_wait)


def test_a_tick_has_each_session_once_and_in_order():
    queue, (a1, b1, a2, a3) = make(), ops("a", "b", "a", "a")
    queue.add([a1, b1, a2, a3])
    assert queue.take(10, timeout=1) == [a1, b1]
    queue.done([b1])
    assert queue.take_now(10) == []
    queue.done([a1])
    assert queue.take_now(10) == [a2]
    queue.done([a2])
    assert queue.take_now(10) == [a3]
    queue.done([a3])
    assert len(queue) == 0


def test_a_list_of_names_waits_for_nobody():
    queue = make()
    (first,) = ops("a")
    listing = ListNames("a", ResultFuture(1), after="", limit=1)
    queue.add([first, listing])
    assert queue.take_now(10) == [first, listing]
    queue.done([first, listing])
    assert len(queue) == 0


def test_more_than_the_limit_are_refused_all_or_none():
    queue = make(max_size=2)
    queue.add(ops("a"))
    with pytest.raises(Overloaded, match="1 operations are waiting and 2 more would make it over 2"):
        queue.add(ops("b", "c"))
    assert len(queue) == 1


def test_a_delayed_operation_comes_again_before_those_behind_it():
    queue, (first, second) = make(), ops("a", "a")
    queue.add([first, second])
    assert queue.take(10, timeout=1) == [first]
    first.result = LATER
    queue.delay(first, 0.02)
    assert queue.take(10, timeout=1) == [first]
    assert first.result is PENDING


def test_a_closed_queue_gives_what_it_has_and_then_ends():
    queue, (first, second) = make(), ops("a", "a")
    queue.add([first, second])
    queue.close()
    with pytest.raises(ServeError, match="the engine is closed"):
        queue.add(ops("b"))
    assert queue.take(10, timeout=1) == [first]
    queue.done([first])
    assert queue.take(10, timeout=1) == [second]
    queue.done([second])
    assert queue.take(10, timeout=1) is None


def test_what_was_added_without_notice_is_left_to_its_event_loop_but_not_forever():
    queue, (op,) = make(), ops("a")
    queue.add([op], notify=False)
    began = time.monotonic()
    assert queue.take(10, timeout=0.1) == [op]
    assert time.monotonic() - began >= 0.09
    assert queue.take(10, timeout=0.01) == []


def test_those_who_came_together_are_waited_for():
    queue = make(max_wait=5.0)
    first = ops("a", "b")
    queue.add(first)
    assert queue.take(10, timeout=1) == first
    queue.done(first)
    (a,), (b,) = ops("a"), ops("b")
    queue.add([a])
    later = threading.Timer(0.05, lambda: queue.add([b]))
    later.start()
    assert queue.take(10, timeout=1) == [a, b]
    later.join()


def push(session: str, steps: int = 1, *, single_step: bool = False) -> Push:
    return Push(session, ResultFuture(1), torch.zeros(1, steps, 3), steps=steps, single_step=single_step, seq=None)


def many(*sessions: str, place: int = 0) -> PushMany:
    future, source = ResultFuture(place + len(sessions)), torch.zeros(len(sessions), 1, 3)
    return PushMany(list(sessions), future, source, single_step=True, seqs=None, place=place)


def test_many_that_are_in_nobodys_way_are_taken_together():
    queue, together, (c,) = make(), many("a", "b"), ops("c")
    queue.add([together, c])
    assert len(queue) == 3
    assert queue.take_now(10) == [together, c]
    (behind,) = ops("b")
    queue.add([behind])
    assert queue.take_now(10) == []
    queue.done([together, c])
    assert queue.take_now(10) == [behind]
    queue.done([behind])
    assert len(queue) == 0


@pytest.mark.parametrize(("before", "sessions"), [("b", "abc"), ("", "aba")])
def test_many_of_which_some_have_to_wait_go_one_by_one(before, sessions):
    queue = make()
    queue.add(ops(*before))
    queue.add([many(*sessions)])
    taken = queue.take_now(10)
    assert [op.session for op in taken] == ([*before] + [s for s in dict.fromkeys(sessions) if s not in before])
    queue.done(taken)
    assert [op.session for op in queue.take_now(10)] == (["b"] if before else ["a"])


def test_more_than_a_tick_takes_are_split():
    queue = make()
    queue.add([many("a", "b", "c", "d", "e")])
    found = [queue.take_now(2) for _ in range(4)]
    assert [[op.sessions for op in taken] for taken in found] == [[["a", "b"]], [["c", "d"]], [["e"]], []]
    assert [op.place for taken in found for op in taken] == [0, 2, 4]
    assert len(queue) == 5
    for taken in found:
        queue.done(taken)
    assert len(queue) == 0


def test_inputs_that_wait_behind_one_of_their_session_are_taken_with_it():
    queue = OperationQueue(max_size=100, max_wait=0.0, chains=True)
    pushes = [push("a") for _ in range(7)]
    queue.add(pushes)
    (chain,) = queue.take_now(10)
    assert isinstance(chain, PushChain)
    assert chain.pushes == pushes[:4]  # a power of two
    queue.put_back(chain)
    assert chain.pushes == pushes[:1]
    queue.done([chain])
    (chain,) = queue.take_now(10)
    assert chain.pushes == pushes[1:5]
    queue.done([chain])
    (chain,) = queue.take_now(10)
    assert chain.pushes == pushes[5:]
    queue.done([chain])
    assert len(queue) == 0


@given(
    kinds=st.lists(st.sampled_from(["step", "alone", "piece", "other"]), min_size=1, max_size=40),
    sessions=st.lists(st.sampled_from("ab"), min_size=40, max_size=40),
    broken=st.lists(st.booleans(), min_size=60, max_size=60),
)
def test_whatever_is_chained_or_put_back_every_session_keeps_its_order(kinds, sessions, broken):
    queue = OperationQueue(max_size=100, max_wait=0.0, chains=True)
    made = {
        "step": lambda s: push(s),
        "alone": lambda s: push(s, single_step=True),
        "piece": lambda s: push(s, 30),
        "other": lambda s: ops(s)[0],
    }
    queue.add(given := [made[kind](session) for kind, session in zip(kinds, sessions, strict=False)])
    seen = []
    while len(queue):
        taken = queue.take_now(2)
        assert len({op.session for op in taken}) == len(taken) > 0
        for op in taken:
            if isinstance(op, PushChain):
                assert len({(p.steps, p.single_step) for p in op.pushes}) == 1
                if broken.pop():
                    queue.put_back(op)
            seen += op.pushes if isinstance(op, PushChain) else [op]
        queue.done(taken)
    for session in "ab":
        assert [op for op in seen if op.session == session] == [op for op in given if op.session == session]


# Fairness.


@given(flood=st.integers(1, 60), others=st.integers(1, 5), limit=st.integers(1, 20))
def test_a_flood_of_one_caller_never_takes_more_than_its_share_of_a_tick(flood, others, limit):
    queue = make(max_size=1000)
    queue.add(ops(*(f"flood:{place}" for place in range(flood))))
    for other in range(others):
        queue.add(ops(f"caller{other}:a"))
    left = {f"caller{other}:a" for other in range(others)}
    for tick in range(1, 100):
        taken = queue.take_now(limit)
        assert len(taken) == min(limit, flood + len(left)) or not taken
        fair = max(1, limit // (1 + len(left)))
        flooded = [op for op in taken if op.session.startswith("flood")]
        served = {op.session for op in taken} & left
        assert len(flooded) <= fair or served == left
        flood, left = flood - len(flooded), left - served
        queue.done(taken)
        if not left:
            # Callers take turns: after as many ticks as it takes to serve each of them once.
            assert tick <= 1 + others // limit + (others % limit > 0)
            break


def test_one_session_cannot_fill_the_queue():
    queue = make(max_size=10)
    for _ in range(6):
        queue.add(ops("a"))
    with pytest.raises(Overloaded, match=r"5 operations of session 'a' are waiting, and the queue has room for 4 more"):
        queue.add(ops("a"))
    queue.add(ops("b"))
    assert len(queue) == 7


def test_one_caller_cannot_fill_the_queue():
    queue = make(max_size=10)
    for place in range(5):
        queue.add(ops(f"alice:{place}"))
    with pytest.raises(Overloaded, match=r"5 operations of caller 'alice' are waiting, 1 more would be over the 5"):
        queue.add(ops("alice:5"))
    queue.add(ops("bob:1"))
    queue.done(queue.take_now(10))
    queue.add(ops("alice:5"))


@given(st.lists(st.lists(st.sampled_from(["a", "x:a", "x:b", "y:a"]), min_size=1, max_size=4), max_size=12))
def test_whatever_is_added_is_taken_and_the_queue_is_empty_in_the_end(groups):
    queue = OperationQueue(max_size=1000, max_wait=0.0, chains=True)
    for place, sessions in enumerate(groups):
        some = [Push(s, ResultFuture(1), torch.zeros(2), steps=1, single_step=True, seq=None) for s in sessions]
        (queue.append if place % 2 else queue.add)(some)
    taken = []
    while some := queue.take_now(2):
        taken += [push for op in some for push in (op.pushes if isinstance(op, PushChain) else [op])]
        queue.done(some)
    assert sorted(op.session for op in taken) == sorted(name for sessions in groups for name in sessions)
    assert len(queue) == 0
    assert queue.first is None


def test_what_is_appended_as_the_queue_closes_is_refused_or_taken():
    queue = make()
    queue.append(ops("a"))
    queue.close()
    with pytest.raises(ServeError, match="the engine is closed"):
        queue.append(ops("b"))
    assert [op.session for op in queue.take(10, timeout=1)] == ["a"]
