"""Operations and futures: every result arrives at its own place."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from hiddenstate.serve.futures import ResultFuture
from hiddenstate.serve.session_operations import PushChain, PushMany, SessionOperation, flattened


def many(count: int, *, seqs: list[int | None] | None = None) -> PushMany:
    names, source = [f"s{n}" for n in range(count)], torch.arange(float(count))[:, None, None]
    return PushMany(names, ResultFuture(count), source, single_step=True, seqs=seqs)


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
