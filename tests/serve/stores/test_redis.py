"""What only the Redis store does: leases, epochs, options in its address."""

import uuid

import pytest
import torch

from hiddenstate.errors import BadInput, SessionLost, StoreFailed
from hiddenstate.serve import Engine
from hiddenstate.serve.stores import Busy, Change, Claim, open_store
from hiddenstate.testing import check_store
from tests.support import redis
from tests.support.deadline import wait_until
from tests.support.models import Deep
from tests.support.redis import RedisCluster, WatchedRedis, free_port, redis_client
from tests.support.stores import begin, claimed, row

CLOSE = {"rtol": 1e-5, "atol": 1e-6}


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
    assert theirs.token != mine.token
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


@pytest.mark.redis
@pytest.mark.parametrize("seq", [2**53 - 1, 2**53, 2**53 + 1, 2**62 - 2])
def test_numbers_of_any_size_are_counted_one_by_one(redis_server, seq):
    store = open_store(redis_server.address(uuid.uuid4().hex))
    begin(store, "a", seq=seq)
    for ahead in (1, 2):
        assert store.commit([Change("a", claimed(store, "a").token, row(seq + ahead), b"answer")]) != [None]
        assert store.read("a").seq == seq + ahead
        assert store.answer("a", seq + ahead) == b"answer"
    assert store.commit([Change("a", claimed(store, "a").token, row(seq + 4))]) == [None]
    store.close()


@pytest.mark.redis
def test_a_damaged_row_is_its_own_sessions_trouble(redis_server):
    prefix = uuid.uuid4().hex
    store = open_store(redis_server.address(prefix))
    begin(store, "a", "b")
    client = redis_client(redis_server.port)
    client.hset(f"{prefix}:session:a", "seq", "many")
    client.close()
    lost, good = store.claim([("a", -1), ("b", -1)])
    assert isinstance(good, Claim)
    with pytest.raises(SessionLost, match="session 'a' is lost: its row is damaged"):
        raise lost.damage
    assert store.commit([Change("a", lost.token, row(3), anew=True)]) != [None]
    assert store.read("a") == row(3)
    store.close()


@pytest.mark.redis
def test_a_redis_that_answers_but_cannot_be_written_to_is_not_ready(tmp_path):
    server = redis.RedisServer(tmp_path)
    try:
        store, client = open_store(server.address()), redis_client(server.port)
        store.check()
        client.config_set("maxmemory", 1)
        with pytest.raises(StoreFailed, match="could not write: OutOfMemoryError"):
            store.check()
        client.config_set("maxmemory", 0)
        client.replicaof("127.0.0.1", free_port())  # as a primary that has come back after a failover
        with pytest.raises(StoreFailed, match="could not write: ReadOnlyError"):
            store.check()
        client.close()
        store.close()
    finally:
        server.stop()


@pytest.mark.redis
def test_where_what_has_a_time_to_live_may_be_evicted_sessions_have_none(tmp_path):
    server = redis.RedisServer(tmp_path, "--maxmemory", "100mb", "--maxmemory-policy", "volatile-lru")
    try:
        store, client = open_store(server.address("mine")), redis_client(server.port)
        store.ttl = 10
        begin(store, "a")
        assert client.ttl("mine:session:a") == -1
        assert store.sweep(20.0, 10) == 1
        assert not client.exists("mine:session:a")
        client.close()
        store.close()
    finally:
        server.stop()


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    if redis.SERVER is None:
        pytest.skip("there is no redis-server on this machine")
    made = RedisCluster(tmp_path_factory.mktemp("cluster"))
    yield made
    made.stop()


@pytest.mark.redis
@pytest.mark.slow
def test_a_cluster_keeps_the_laws_of_a_store(cluster):
    check_store(lambda: open_store(cluster.address(uuid.uuid4().hex)))


@pytest.mark.redis
@pytest.mark.slow
def test_sessions_in_a_cluster_are_spread_and_each_is_in_one_slot(cluster):
    prefix = uuid.uuid4().hex
    torch.manual_seed(0)
    model, twin = Deep(), Deep()
    twin.load_state_dict(model.state_dict())
    names, x = [f"{n}" for n in range(60)], torch.randn(3, 60, 3)
    with torch.no_grad():
        wanted = model(x.transpose(0, 1))
    with Engine(model, cluster.address(prefix)) as one, Engine(twin, cluster.address(prefix)) as two:
        for name in names:
            one.open(name)
        got = [(one, two, one)[step].push_many(names, x[step]) for step in range(3)]
        torch.testing.assert_close(torch.stack(got, 1), wanted, **CLOSE)
        assert two.sessions() == sorted(names)
        assert two.sessions("1", after="11", limit=2) == ["12", "13"]
        one.close("0")
        assert two.sessions(limit=1) == ["1"]
    held = [redis_client(server.port) for server in cluster.servers]
    assert all(len(client.keys(f"{prefix}:*:session:*")) > 5 for client in held)
    for client in held:
        client.close()


@pytest.mark.redis
@pytest.mark.slow
def test_a_cluster_without_one_of_its_nodes_is_not_ready(cluster):
    store = open_store(cluster.address())

    def is_ready() -> bool:
        try:
            store.check()
        except StoreFailed:
            return False
        return True

    for server in cluster.servers:
        assert is_ready()
        server.stop()
        with pytest.raises(StoreFailed, match=r"could not (be reached|write): .*Nothing was acknowledged"):
            store.check()
        server.start()
        wait_until(is_ready, seconds=60)
    store.close()


@pytest.mark.redis
@pytest.mark.slow
def test_a_replica_takes_over_and_what_was_confirmed_is_there(tmp_path):
    if redis.SERVER is None:
        pytest.skip("there is no redis-server on this machine")
    watched, x = WatchedRedis(tmp_path), torch.randn(4, 3)
    torch.manual_seed(0)
    model = Deep()
    with torch.no_grad():
        wanted = model(x.unsqueeze(0))[0]
    got = []

    def pushed(seq: int) -> bool:
        try:
            got.append(engine.push("a", x[seq - 1], seq))
        except StoreFailed:
            return False
        return True

    try:
        with Engine(model, watched.address(replicas=1)) as engine:
            engine.open("a")
            assert pushed(1)
            assert pushed(2)
            watched.replica.stop()
            for _ in range(2):  # the second one would be answered again, by what the replica does not have
                with pytest.raises(StoreFailed, match="0 of 1 replicas confirmed it"):
                    engine.push("a", x[2], 3)
            watched.replica.start()
            wait_until(lambda: pushed(3), seconds=30)
        with Engine(model, watched.address()) as engine:
            watched.primary.stop()
            wait_until(lambda: pushed(4), seconds=60)
            assert engine.info("a").seq == 4
    finally:
        watched.stop()
    torch.testing.assert_close(torch.stack(got), wanted, **CLOSE)
