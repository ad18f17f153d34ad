"""Stores to run the same tests on."""

import uuid
from collections.abc import Callable, Iterator

import pytest

from tests.support import redis
from tests.support.redis import RedisServer


@pytest.fixture(scope="session")
def redis_server(tmp_path_factory) -> Iterator[RedisServer]:
    """One Redis for all tests of a process; each test has keys of its own in it."""
    if redis.SERVER is None:
        pytest.skip("there is no redis-server on this machine")
    server = RedisServer(tmp_path_factory.mktemp("redis"))
    yield server
    server.stop()


@pytest.fixture(params=["memory", "sqlite", pytest.param("redis", marks=pytest.mark.redis)])
def new_address(request, tmp_path) -> Callable[[], str]:
    """Returns the address of another empty store each time it is called; there is one for each kind."""
    match request.param:
        case "sqlite":
            return lambda: f"sqlite:///{tmp_path}/{uuid.uuid4().hex}.db"
        case "redis":
            server = request.getfixturevalue("redis_server")
            return lambda: server.address(uuid.uuid4().hex)
    return lambda: "memory:"


@pytest.fixture
def address(new_address) -> str:
    """The address of an empty store of each kind."""
    return new_address()
