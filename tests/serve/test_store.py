"""What every store keeps to, whatever it is made of."""

import uuid

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hiddenstate.errors import BadInput, StoreFailed
from hiddenstate.serve.stores import Advance, Blobs, Busy, Change, Claim, MemoryStore, Row, Store, open_store
from hiddenstate.state import Format, State
from tests.support.redis import free_port


@pytest.fixture
def store(address):
    made = open_store(address)
    made.replay = 3
    yield made
    made.close()


def row(seq: int = 0, *, touched: float = 10.0, state: bytes | None = b"state", fingerprint: str = "model") -> Row:
    return Row(seq, 2 * seq, 5.0, touched, fingerprint, state)


def begin(store: Store, *names: str, **facts: object) -> None:
    assert None not in store.commit([Change(name, None, row(**facts)) for name in names])


def claimed(store: Store, name: str) -> Claim:
    (found,) = store.claim([(name, -1)])
    assert isinstance(found, Claim)
    return found


def test_what_is_committed_is_read_again(store):
    begin(store, "a", "ü:/%", state=None)
    assert store.read("a") == row(state=None)
    token = claimed(store, "a").token
    assert store.commit([Change("a", token, row(1), b"answer")])[0] is not None
    assert store.read("a") == row(1)
    assert claimed(store, "a").row == row(1)
    assert store.read("ü:/%") == row(state=None)
    assert store.read("nobody") is None
    assert store.claim([("nobody", -1), ("a", -1)])[0] is None


def test_a_session_is_not_made_twice(store):
    begin(store, "a")
    assert store.commit([Change("a", None, row(7)), Change("b", None, row())])[0] is None
    assert store.read("a") == row()
    assert store.read("b") == row()


def test_a_change_under_an_old_token_is_not_taken_and_others_are(store):
    begin(store, "a", "b")
    old = claimed(store, "a").token
    assert store.commit([Change("a", old, row(1))]) != [None]
    other = claimed(store, "b").token
    first, second = store.commit([Change("a", old, row(1)), Change("b", other, row(1))])
    assert first is None
    assert second is not None
    assert store.read("b") == row(1)


def test_a_removed_session_is_gone_with_its_answers_and_its_token_holds_no_more(store):
    begin(store, "a")
    store.commit([Change("a", claimed(store, "a").token, row(1), b"answer")])
    token = claimed(store, "a").token
    assert store.commit([Change("a", token, None, None, True)]) == [0]
    assert store.read("a") is None
    assert store.count() == 0
    begin(store, "a")
    assert store.answer("a", 1) is None
    assert store.commit([Change("a", token, row(1))]) == [None]


def test_the_last_answers_are_kept(store):
    begin(store, "a")
    for seq in range(1, 6):
        store.commit([Change("a", claimed(store, "a").token, row(seq), b"answer %d" % seq)])
    assert [store.answer("a", seq) for seq in range(1, 6)] == [None, None, b"answer 3", b"answer 4", b"answer 5"]
    store.commit([Change("a", claimed(store, "a").token, row(4), None, True)])
    assert [store.answer("a", seq) for seq in range(3, 6)] == [None, None, None]


def test_names_are_in_order_and_counted(store):
    begin(store, "b", "a1", "a3", "a2", "ä")
    assert store.sessions("", "", 10) == ["a1", "a2", "a3", "b", "ä"]
    assert store.sessions("a", "", 2) == ["a1", "a2"]
    assert store.sessions("a", "a1", 10) == ["a2", "a3"]
    assert store.sessions("", "a3", 10) == ["b", "ä"]
    assert store.count() == 5


def test_the_old_are_swept_a_few_at_a_time(store):
    begin(store, *(f"old{n}" for n in range(5)), touched=1.0)
    begin(store, "young", touched=100.0)
    gone = [store.sweep(50.0, 2) for _ in range(4)]
    assert sum(gone) == 5
    assert max(gone) <= 2
    assert store.sessions("", "", 10) == ["young"]
    assert store.count() == 1


def test_many_sessions_are_claimed_at_once(store):
    names = [f"{n:04d}" for n in range(1200)]
    begin(store, *names)
    assert all(isinstance(found, Claim) for found in store.claim([(name, -1) for name in names]))


def test_a_state_may_be_any_bytes(store):
    begin(store, "a", state=bytes(range(256)) * 40)
    assert store.read("a").state == bytes(range(256)) * 40


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=25, deadline=None)
@given(data=st.data())
def test_to_move_many_on_at_once_is_to_change_each(store, data):
    """Also where some tokens hold no more, and where several inputs were applied to each."""
    names = [uuid.uuid4().hex for _ in range(5)]
    begin(store, *names, state=None)
    seqs = dict.fromkeys(names, 0)
    answers: dict[tuple[str, int], bytes] = {}
    for _ in range(data.draw(st.integers(1, 4))):
        moving = data.draw(st.lists(st.sampled_from(names), unique=True, min_size=1))
        inputs = data.draw(st.integers(1, 5)) if store.chains else 1
        tokens = [claimed(store, name).token for name in moving]
        stale = data.draw(st.lists(st.booleans(), min_size=len(moving), max_size=len(moving)))
        group = moved(moving, [token + 10**6 * old for token, old in zip(tokens, stale, strict=True)], seqs, inputs)
        versions = store.advance([group], [])
        assert [version is None for version in versions] == stale
        for place, (name, old) in enumerate(zip(moving, stale, strict=True)):
            if not old:
                for ahead in range(inputs):
                    seqs[name] += 1
                    answers[name, seqs[name]] = bare(store, group.answers, place * inputs + ahead)
                assert store.read(name) == Row(
                    seqs[name], 2 * seqs[name], 5.0, 10.0, "model", bare(store, group.states, place)
                )
        store.release(list(zip(moving, tokens, strict=True)))
        for name in names:
            kept = range(max(1, seqs[name] - store.replay + 1), seqs[name] + 1)
            found = [store.answer(name, seq) for seq in kept]
            assert [one if isinstance(one, bytes) else one[1] for one in found] == [answers[name, seq] for seq in kept]
            assert store.answer(name, seqs[name] - store.replay) is None


def moved(names: list[str], tokens: list[int], seqs: dict[str, int], inputs: int) -> Advance:
    """Sessions that have come so many inputs further, with states and answers made up."""
    states = State({"h": torch.randn(2, len(names), 3), "c": torch.randn(2, len(names), 1)}, 1)
    answers = State({"0": torch.randn(len(names) * inputs, 4)})
    after = np.array([seqs[name] + inputs for name in names])
    return Advance(
        sessions=names,
        tokens=np.array(tokens),
        seqs=after,
        steps=2 * after,
        opened=np.full(len(names), 5.0),
        states=Blobs(Format(states), states),
        answers=Blobs(Format(answers), answers),
        inputs=inputs,
        touched=10.0,
        fingerprint="model",
    )


def bare(store: Store, blobs: Blobs, row: int) -> bytes:
    return (blobs.sealed() if store.sealed else blobs.bare())[row]


@pytest.mark.redis
def test_a_leased_session_is_busy_for_others_until_it_is_given_back(redis_server):
    one, two = (open_store(redis_server.address("leases", lease=30)) for _ in range(2))
    begin(one, "a")
    mine = claimed(one, "a")
    (busy,) = two.claim([("a", -1)])
    assert isinstance(busy, Busy)
    assert 0 < busy.seconds <= 30
    one.release([("a", mine.token)])
    theirs = claimed(two, "a")
    assert theirs.token > mine.token
    assert one.commit([Change("a", mine.token, row(1))]) == [None]
    assert two.commit([Change("a", theirs.token, row(1))]) == [theirs.token]
    (known,) = two.claim([("a", theirs.token)])
    assert known.row is None  # its version is the one that is known already
    for store in (one, two):
        store.close()


@pytest.mark.redis
def test_number_and_fingerprint_are_checked_with_the_epoch(redis_server):
    store = open_store(redis_server.address("checked"))
    begin(store, "a")
    assert store.commit([Change("a", claimed(store, "a").token, row(2))]) == [None]
    assert store.commit([Change("a", claimed(store, "a").token, row(1, fingerprint="other"))]) == [None]
    assert store.commit([Change("a", claimed(store, "a").token, row(1))]) != [None]
    store.close()


@pytest.mark.parametrize("address", ["", "memory:x", "sqlite://x", "sqlite:///", "postgres://x", "redis:", "file.db"])
def test_an_address_that_leads_nowhere_is_refused(address):
    with pytest.raises(BadInput, match=r"the store is .*, but 'memory:', 'sqlite:///path'"):
        open_store(address)


def test_a_store_may_be_given_as_it_is():
    store = MemoryStore()
    assert open_store(store) is store


def test_options_in_the_address_of_redis():
    with pytest.raises(BadInput, match="is no number of seconds"):
        open_store("redis://127.0.0.1:1/0?lease=long")
    with pytest.raises(StoreFailed, match="could not be reached") as caught:
        open_store(f"redis://:secret@127.0.0.1:{free_port()}/0")
    assert "secret" not in str(caught.value)


def test_a_session_made_anew_by_somebody_else_is_not_taken_for_the_old_one(tmp_path):
    """A store remembers where sessions lie in the file; another one on the same file may have changed that."""
    mine, theirs = (open_store(f"sqlite:///{tmp_path}/sessions.db") for _ in range(2))
    begin(mine, "a", "b", state=None)
    old = {name: claimed(mine, name).token for name in "ab"}
    theirs.commit([Change("a", claimed(theirs, "a").token, None, None, True)])
    begin(theirs, "a", state=None)
    group = moved(["a", "b"], [old["a"], old["b"]], {"a": 0, "b": 0}, 2)
    first, second = mine.advance([group], [])
    assert first is None
    assert second is not None
    assert mine.read("a") == row(state=None)
    assert [mine.answer("a", seq) for seq in (1, 2)] == [None, None]
    assert mine.answer("b", 2) == group.answers.sealed()[3]
    assert mine.others_wrote()
    assert mine.advance([moved(["a"], [claimed(mine, "a").token], {"a": 0}, 1)], []) != [None]
    assert theirs.answer("a", 1) is not None
    for store in (mine, theirs):
        store.close()


def test_more_sessions_than_are_remembered(tmp_path, monkeypatch):
    from hiddenstate.serve.stores import sqlite

    monkeypatch.setattr(sqlite, "_REMEMBERED", 3)
    store = open_store(f"sqlite:///{tmp_path}/sessions.db")
    names = [f"{n}" for n in range(8)]
    begin(store, *names, state=None)
    tokens = [found.token for found in store.claim([(name, -1) for name in names])]
    group = moved(names, tokens, dict.fromkeys(names, 0), 1)
    assert None not in store.advance([group], [])
    assert [store.answer(name, 1) for name in names] == group.answers.sealed()
    assert [store.read(name).state for name in names] == group.states.sealed()
    store.close()
