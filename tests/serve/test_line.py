"""Who is next: order within a session, and nobody forgotten."""

import threading
import time

import pytest

from hiddenstate.errors import Overloaded, ServeError
from hiddenstate.serve.line import Line
from hiddenstate.serve.ops import LATER, PENDING, Names, Op, Ticket


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
