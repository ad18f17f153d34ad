"""Who is next: order within a session, and nobody forgotten."""

import threading
import time

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hiddenstate.errors import Overloaded, ServeError
from hiddenstate.serve.inputs import Chain, Many, Push
from hiddenstate.serve.queue import Line
from hiddenstate.serve.session_operations import LATER, PENDING, Names, Op, Ticket


def ops(*sessions: str) -> list[Op]:
    return [Op(session, Ticket(1)) for session in sessions]


def make(most: int = 100, max_wait: float = 0.0) -> Line:
    return Line(most=most, max_wait=max_wait)


def test_a_tick_has_each_session_once_and_in_order():
    line, (a1, b1, a2, a3) = make(), ops("a", "b", "a", "a")
    line.add([a1, b1, a2, a3])
    assert line.take(10, timeout=1) == [a1, b1]
    line.done([b1])
    assert line.take_now(10) == []
    line.done([a1])
    assert line.take_now(10) == [a2]
    line.done([a2])
    assert line.take_now(10) == [a3]
    line.done([a3])
    assert len(line) == 0


def test_a_list_of_names_waits_for_nobody():
    line = make()
    (first,) = ops("a")
    listing = Names("a", Ticket(1), after="", limit=1)
    line.add([first, listing])
    assert line.take_now(10) == [first, listing]
    line.done([first, listing])
    assert len(line) == 0


def test_more_than_the_limit_are_refused_all_or_none():
    line = make(most=2)
    line.add(ops("a"))
    with pytest.raises(Overloaded, match="1 operations are waiting and 2 more would make it over 2"):
        line.add(ops("b", "c"))
    assert len(line) == 1


def test_a_delayed_operation_comes_again_before_those_behind_it():
    line, (first, second) = make(), ops("a", "a")
    line.add([first, second])
    assert line.take(10, timeout=1) == [first]
    first.result = LATER
    line.delay(first, 0.02)
    assert line.take(10, timeout=1) == [first]
    assert first.result is PENDING


def test_a_closed_line_gives_what_it_has_and_then_ends():
    line, (first, second) = make(), ops("a", "a")
    line.add([first, second])
    line.close()
    with pytest.raises(ServeError, match="the engine is closed"):
        line.add(ops("b"))
    assert line.take(10, timeout=1) == [first]
    line.done([first])
    assert line.take(10, timeout=1) == [second]
    line.done([second])
    assert line.take(10, timeout=1) is None


def test_what_was_added_quietly_is_left_to_its_event_loop_but_not_forever():
    line, (op,) = make(), ops("a")
    line.add([op], quietly=True)
    began = time.monotonic()
    assert line.take(10, timeout=0.1) == [op]
    assert time.monotonic() - began >= 0.09
    assert line.take(10, timeout=0.01) == []


def test_those_who_came_together_are_waited_for():
    line = make(max_wait=5.0)
    first = ops("a", "b")
    line.add(first)
    assert line.take(10, timeout=1) == first
    line.done(first)
    (a,), (b,) = ops("a"), ops("b")
    line.add([a])
    later = threading.Timer(0.05, lambda: line.add([b]))
    later.start()
    assert line.take(10, timeout=1) == [a, b]
    later.join()


def push(session: str, steps: int = 1, *, alone: bool = False) -> Push:
    return Push(session, Ticket(1), 0, (torch.zeros(1, steps, 3), steps, alone, None))


def many(*sessions: str, place: int = 0) -> Many:
    return Many(list(sessions), Ticket(place + len(sessions)), place, (torch.zeros(len(sessions), 1, 3), True, None))


def test_many_that_are_in_nobodys_way_are_taken_together():
    line, together, (c,) = make(), many("a", "b"), ops("c")
    line.add([together, c])
    assert len(line) == 3
    assert line.take_now(10) == [together, c]
    (behind,) = ops("b")
    line.add([behind])
    assert line.take_now(10) == []
    line.done([together, c])
    assert line.take_now(10) == [behind]
    line.done([behind])
    assert len(line) == 0


@pytest.mark.parametrize(("before", "sessions"), [("b", "abc"), ("", "aba")])
def test_many_of_which_some_have_to_wait_go_one_by_one(before, sessions):
    line = make()
    line.add(ops(*before))
    line.add([many(*sessions)])
    taken = line.take_now(10)
    assert [op.session for op in taken] == ([*before] + [s for s in dict.fromkeys(sessions) if s not in before])
    line.done(taken)
    assert [op.session for op in line.take_now(10)] == (["b"] if before else ["a"])


def test_more_than_a_tick_takes_are_split():
    line = make()
    line.add([many("a", "b", "c", "d", "e")])
    found = [line.take_now(2) for _ in range(4)]
    assert [[op.sessions for op in taken] for taken in found] == [[["a", "b"]], [["c", "d"]], [["e"]], []]
    assert [op.place for taken in found for op in taken] == [0, 2, 4]
    assert len(line) == 5
    for taken in found:
        line.done(taken)
    assert len(line) == 0


def test_inputs_that_wait_behind_one_of_their_session_are_taken_with_it():
    line = Line(most=100, max_wait=0.0, chains=True)
    pushes = [push("a") for _ in range(7)]
    line.add(pushes)
    (chain,) = line.take_now(10)
    assert isinstance(chain, Chain)
    assert chain.pushes == pushes[:4]  # a power of two
    line.put_back(chain)
    assert chain.pushes == pushes[:1]
    line.done([chain])
    (chain,) = line.take_now(10)
    assert chain.pushes == pushes[1:5]
    line.done([chain])
    (chain,) = line.take_now(10)
    assert chain.pushes == pushes[5:]
    line.done([chain])
    assert len(line) == 0


@given(
    kinds=st.lists(st.sampled_from(["step", "alone", "piece", "other"]), min_size=1, max_size=40),
    sessions=st.lists(st.sampled_from("ab"), min_size=40, max_size=40),
    broken=st.lists(st.booleans(), min_size=60, max_size=60),
)
def test_whatever_is_chained_or_put_back_every_session_keeps_its_order(kinds, sessions, broken):
    line = Line(most=100, max_wait=0.0, chains=True)
    made = {
        "step": lambda s: push(s),
        "alone": lambda s: push(s, alone=True),
        "piece": lambda s: push(s, 30),
        "other": lambda s: ops(s)[0],
    }
    line.add(given := [made[kind](session) for kind, session in zip(kinds, sessions, strict=False)])
    seen = []
    while len(line):
        taken = line.take_now(2)
        assert len({op.session for op in taken}) == len(taken) > 0
        for op in taken:
            if isinstance(op, Chain):
                assert len({(p.steps, p.alone) for p in op.pushes}) == 1
                if broken.pop():
                    line.put_back(op)
            seen += op.pushes if isinstance(op, Chain) else [op]
        line.done(taken)
    for session in "ab":
        assert [op for op in seen if op.session == session] == [op for op in given if op.session == session]
