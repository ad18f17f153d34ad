"""Where a Redis is: what an address says, and what it leaves to the redis library."""

import pytest
from redis.exceptions import NoPermissionError

from hiddenstate.errors import BadInput, StoreFailed
from hiddenstate.serve.stores.redis_address import RedisAddress


def test_an_address_is_split_into_what_is_ours_and_what_is_not():
    read = RedisAddress.read("redis://u:secret@host:1/0?lease=0.5&prefix=mine&replicas=2&health_check_interval=3")
    assert (read.url, read.kind) == ("redis://u:secret@host:1/0?health_check_interval=3", "")
    assert (read.lease, read.prefix, read.replicas) == (0.5, "mine", 2)
    assert "secret" not in read.shown


@pytest.mark.parametrize(
    ("address", "hosts"),
    [
        ("redis+sentinel://a:1,b/service", [("a", 1), ("b", 26379)]),
        ("redis+cluster://a:1,[::1]:2,c", [("a", 1), ("::1", 2), ("c", 6379)]),
        ("rediss+cluster://user:secret@a:1", [("a", 1)]),
    ],
)
def test_sentinels_and_clusters_have_several_hosts(address, hosts):
    assert RedisAddress.read(address).hosts == hosts


@pytest.mark.parametrize(
    ("address", "message"),
    [
        ("redis://host/0?lease=long", "is no number of seconds"),
        ("redis://host/0?replicas=many", "replicas no number"),
        ("redis+sentinel://host:1", r"redis\+sentinel://host:port,host:port/service"),
        ("redis+other://host:1", r"redis\+cluster://host:port"),
        ("redis+cluster://host:1?replicas=1", "min-replicas-to-write"),
    ],
)
def test_an_address_that_cannot_be_meant_is_refused(address, message):
    with pytest.raises(BadInput, match=message):
        RedisAddress.read(address)


def test_a_port_that_is_none_is_refused():
    with pytest.raises(BadInput, match=r"'a:b' in the address of the store is no host:port"):
        _ = RedisAddress.read("redis+cluster://a:b").hosts


class _Memory:
    """A Redis with these settings of its memory, or one that does not tell them."""

    def __init__(self, *nodes: dict[str, object]) -> None:
        self._nodes = nodes

    def info(self, section: str, *, target_nodes: str = "") -> dict[str, object]:
        assert section == "memory"
        if not self._nodes:
            raise NoPermissionError
        return {str(place): node for place, node in enumerate(self._nodes)} if target_nodes else self._nodes[0]


FULL = {"maxmemory": 1000, "maxmemory_policy": "noeviction"}


@pytest.mark.parametrize("kind", ["redis://host", "redis+sentinel://host/service", "redis+cluster://host"])
def test_a_redis_that_removes_any_keys_is_refused(kind):
    place = RedisAddress.read(kind)
    evicting = FULL | {"maxmemory_policy": "allkeys-lru"}
    with pytest.raises(StoreFailed, match=r"removes any keys .*maxmemory-policy allkeys-lru.* Set it to noeviction"):
        place.evicts(_Memory(evicting))
    assert not place.evicts(_Memory(FULL))
    assert not place.evicts(_Memory(evicting | {"maxmemory": 0}))  # which is: as much as there is
    assert not place.evicts(_Memory())
    assert place.evicts(_Memory(FULL | {"maxmemory_policy": "volatile-ttl"}))


def test_a_cluster_is_as_its_worst_node():
    place = RedisAddress.read("redis+cluster://host")
    assert place.evicts(_Memory(FULL, FULL | {"maxmemory_policy": "volatile-lru"}))
    with pytest.raises(StoreFailed, match="removes any keys"):
        place.evicts(_Memory(FULL, FULL | {"maxmemory_policy": "allkeys-random"}))
