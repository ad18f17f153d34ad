"""Futures: every result arrives at its own place, and whoever waits no longer is not served."""

import asyncio
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hiddenstate.errors import DeadlineExceeded
from hiddenstate.serve.futures import AsyncResultFuture, ResultFuture, notify_all
from hiddenstate.serve.session_operations import SessionOperation


@given(order=st.permutations(range(5)))
def test_a_future_is_complete_with_its_last_result_whatever_the_order(order):
    future, complete = ResultFuture(5), []
    ops = [SessionOperation(f"s{place}", future, place) for place in range(5)]
    for turn, place in enumerate(order):
        ops[place].result = place
        ops[place].deliver(complete)
        assert complete == ([future] if turn == 4 else [])
    notify_all(complete)
    assert future.wait(1) == [0, 1, 2, 3, 4]


def test_a_future_whose_turn_has_not_come_in_time_is_given_up_for_good():
    future = ResultFuture(1)
    with pytest.raises(DeadlineExceeded, match=r"did not come within 0\.01 s, so it was not applied and will not be"):
        future.wait(0.01)
    assert future.cancelled


def test_a_future_under_way_times_out_and_says_that_nobody_knows():
    future = ResultFuture(1)
    future.started = True
    with pytest.raises(TimeoutError, match=r"no answer within 0\.01 s.*repeat it with the same seq") as caught:
        future.wait(0.01)
    assert not isinstance(caught.value, DeadlineExceeded)


def test_a_coroutine_is_woken_from_another_thread():
    async def ask() -> list[int]:
        future = AsyncResultFuture(1)
        future.put(0, 7)
        threading.Thread(target=notify_all, args=([future],)).start()
        return await asyncio.wait_for(future.waiter, 5)

    assert asyncio.run(ask()) == [7]


def test_a_future_of_a_loop_that_has_ended_stops_nobody():
    async def begin() -> AsyncResultFuture:
        return AsyncResultFuture(1)

    gone, other = asyncio.run(begin()), ResultFuture(1)
    gone.put(0, 1)
    other.put(0, 2)
    notify_all([gone, other])
    assert other.wait(1) == [2]
