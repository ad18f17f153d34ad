"""What only the Redis store does: leases, epochs, options in its address."""

import pytest

from hiddenstate.errors import BadInput, StoreFailed
from hiddenstate.serve.stores import Busy, Change, open_store
from tests.support.redis import free_port
from tests.support.stores import begin, claimed, row


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


def test_options_in_the_address_of_redis():
    with pytest.raises(BadInput, match="is no number of seconds"):
        open_store("redis://127.0.0.1:1/0?lease=long")
    with pytest.raises(StoreFailed, match="could not be reached") as caught:
        open_store(f"redis://:secret@127.0.0.1:{free_port()}/0")
    assert "secret" not in str(caught.value)
