"""What every store keeps to, whatever it is made of."""

import uuid
from types import SimpleNamespace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hiddenstate.serve import Engine
from hiddenstate.serve.arena import Arena
from hiddenstate.serve.queue import OperationQueue
from hiddenstate.serve.stores import Blobs, Change, Claim, Lookup, MemoryStore, Row, Store, open_store
from hiddenstate.serve.tick import TickRunner
from hiddenstate.serve.trial import prepare
from hiddenstate.testing import FakeClock
from hiddenstate.testing.check_store import moved_on
from tests.support.deadline import wait_until
from tests.support.models import Deep
from tests.support.stores import begin, claimed, row


@pytest.fixture
def store(address):
    made = open_store(address)
    made.replay = 3
    yield made
    made.close()


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
        group = moved_on(moving, [token + 10**6 * old for token, old in zip(tokens, stale, strict=True)], seqs, inputs)
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


def bare(store: Store, blobs: Blobs, row: int) -> bytes:
    return (blobs.sealed() if store.sealed else blobs.bare())[row]


@given(steps=st.lists(st.tuples(st.sampled_from(["add", "remove", "ask"]), st.sampled_from("abcd")), max_size=30))
def test_a_lookup_that_remembers_is_never_out_of_date(steps):
    where, known = Lookup(), {}
    asked: list[str] = []
    for number, (verb, name) in enumerate(steps):
        if verb == "add":
            where.add(name, number)
            known[name] = number
        elif verb == "remove":
            assert where.remove(name) == known.pop(name, None)
        else:
            asked.append(name)  # of the list that the last answer was for
        assert where.all(asked).tolist() == [known.get(one, -1) for one in asked]
        assert where.names == known


def test_sessions_that_expired_are_swept_however_many_there_are(address):
    clock = FakeClock()
    with Engine(Deep(), address, ttl=0.4, clock=clock) as engine:
        for _ in range(1500):
            engine.open()
        clock.advance(100.0)
        wait_until(lambda: not engine.sessions(limit=1), seconds=60)
        assert engine.open("anew") == "anew"


@pytest.mark.parametrize("old", [0, 500, 5000])
def test_a_sweep_sees_all_sessions_in_time_whatever_their_number(old):
    """Five thousand expired ones go at once; among ten thousand living ones each is looked at every 30 seconds."""
    store, model, queue = MemoryStore(), prepare(Deep()), OperationQueue(max_size=1, max_wait=0.0)
    store.ttl = 400.0
    try:
        arena = Arena(model.initial(), 1)
        ticks = TickRunner(model, store, queue, arena=arena, policy=SimpleNamespace(), clock=lambda: 1000.0)
        begin(store, *(f"old {n}" for n in range(old)), touched=1.0)
        begin(store, *(f"{n}" for n in range(10_000)), touched=1000.0)
        waits = [ticks.sweep() for _ in range((10_000 + old) // 1000 + 1)]
        assert sum(waits) <= 31.0
        assert store.count() == 10_000
        assert waits[: old // 1000] == [0.0] * (old // 1000)
    finally:
        model.close()
