"""What runs within Redis: whatever is in the key of one session, the others are served."""

import time
import uuid

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hiddenstate.errors import SessionLost
from hiddenstate.serve import Engine
from hiddenstate.serve.stores import Busy, Change, Claim, open_store
from tests.support.models import Deep
from tests.support.redis import redis_client
from tests.support.stores import begin, claimed, row

pytestmark = pytest.mark.redis

FIELDS = ["version", "seq", "steps", "opened", "touched", "fingerprint", "until", "holder", "epoch", "line", "a0"]
KINDS = {
    "text": lambda client, key: client.set(key, "x"),
    "list": lambda client, key: client.rpush(key, "x"),
    "number": lambda client, key: client.incr(key),
}


@given(
    changed=st.dictionaries(st.sampled_from(FIELDS), st.binary(max_size=6), max_size=4),
    kind=st.sampled_from(["hash", *KINDS]),
)
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_what_somebody_wrote_to_one_key_is_that_sessions_trouble_alone(redis_server, changed, kind):
    prefix = uuid.uuid4().hex
    store, client = open_store(redis_server.address(prefix)), redis_client(redis_server.port)
    begin(store, "a", "b")
    if kind != "hash":
        client.delete(f"{prefix}:session:a")
        KINDS[kind](client, f"{prefix}:session:a")
    elif changed:
        client.hset(f"{prefix}:session:a", mapping=changed)
    damaged, good = store.claim([("a", -1), ("b", -1)])
    assert isinstance(good, Claim)
    store.release([("a", getattr(damaged, "token", 1)), ("b", good.token)])
    damaged, good = store.claim([("a", -1), ("b", -1)])  # both were given back
    if isinstance(damaged, Claim) and damaged.damage is not None:
        anew = Change("a", damaged.token, row(3), anew=True)
        assert None not in store.commit([anew, Change("b", good.token, row(1))])
        assert store.read("a") == row(3)
    assert store.read("b") is not None
    client.close()
    store.close()


@pytest.mark.parametrize("kind", KINDS)
def test_a_key_of_another_kind_fails_no_other_session_and_can_be_begun_anew(redis_server, kind):
    prefix, x = uuid.uuid4().hex, torch.randn(2, 3)
    client = redis_client(redis_server.port)
    with Engine(Deep(), redis_server.address(prefix)) as engine:
        for name in "ab":
            engine.open(name)
        client.delete(f"{prefix}:session:a")
        KINDS[kind](client, f"{prefix}:session:a")
        lost, answered = engine.push_many(["a", "b"], x, errors="return")
        assert isinstance(lost, SessionLost)
        assert lost.reason == "damaged"
        assert answered.shape == (2,)
        with pytest.raises(SessionLost, match="session 'a' is lost: its row is damaged"):
            engine.info("a")
        assert engine.info("b").seq == 1
        engine.open("a")
        engine.push("a", x[0], 1)
    client.close()


def test_a_lease_that_was_given_before_the_clock_was_set_back_locks_nobody_out(redis_server):
    prefix = uuid.uuid4().hex
    one, two = (open_store(redis_server.address(prefix, lease=1)) for _ in range(2))
    begin(one, "a")
    mine = claimed(one, "a")
    assert isinstance(two.claim([("a", -1)])[0], Busy)
    client = redis_client(redis_server.port)
    client.hset(f"{prefix}:session:a", "until", int(1e3 * (time.time() + 3600)))
    client.close()
    theirs = claimed(two, "a")
    assert one.commit([Change("a", mine.token, row(1))]) == [None]  # the epoch is another one
    assert None not in two.commit([Change("a", theirs.token, row(1))])
    for store in (one, two):
        store.close()
