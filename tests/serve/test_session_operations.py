"""Operations and futures: every result arrives at its own place."""

import asyncio
import threading

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hiddenstate.serve.session_operations import (
    AsyncResultFuture,
    PushChain,
    PushMany,
    ResultFuture,
    SessionOperation,
    flattened,
    notify_all,
)


def many(count: int, *, seqs: list[int | None] | None = None) -> PushMany:
    names, source = [f"s{n}" for n in range(count)], torch.arange(float(count))[:, None, None]
    return PushMany(names, ResultFuture(count), source, single_step=True, seqs=seqs)


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


def test_a_future_without_its_results_times_out():
    with pytest.raises(TimeoutError, match=r"no answer within 0\.01 s.*repeat it with the same seq"):
        ResultFuture(1).wait(0.01)


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


@given(count=st.integers(2, 9), data=st.data())
def test_however_many_are_split_each_input_keeps_its_session_row_number_and_place(count, data):
    seqs = data.draw(st.none() | st.lists(st.none() | st.integers(1, 9), min_size=count, max_size=count))
    whole = many(count, seqs=seqs)
    first, rest = whole.split(data.draw(st.integers(1, count - 1)))
    pushes = [*first.as_pushes(), *rest.as_pushes()]
    assert [push.session for push in pushes] == whole.sessions
    assert [push.place for push in pushes] == list(range(count))
    assert [push.piece(torch.float32, (1,)).item() for push in pushes] == list(range(count))
    assert [push.seq for push in pushes] == (seqs or [None] * count)


def test_only_those_that_were_split_are_flattened():
    untouched, split, other = many(2), many(3), SessionOperation("a", ResultFuture(1))
    pushes = split.as_pushes()
    assert flattened([untouched, split, other]) == [untouched, *pushes, other]
    assert flattened([untouched, other], split=True) == [*untouched.as_pushes(), other]


def test_a_chain_follows_where_every_number_is_the_next():
    chain = PushChain(many(3, seqs=[None, 5, None]).as_pushes())
    assert chain.follows(3)
    assert not chain.follows(4)


def test_a_result_is_not_replaced_by_a_later_failure():
    first, second = PushChain(many(2).as_pushes()).pushes
    first.result = "done"
    PushChain([first, second]).fail(ValueError("too late"))
    assert first.result == "done"
    assert isinstance(second.result, ValueError)
