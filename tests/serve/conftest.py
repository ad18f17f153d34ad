"""Stores to run the same tests on, and a server to talk to."""

import uuid
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import torch
from torch import nn

from hiddenstate.serve import Engine
from tests.support import disk, redis
from tests.support.models import Deep
from tests.support.redis import RedisServer
from tests.support.web import serving


@pytest.fixture(scope="session")
def redis_server(tmp_path_factory) -> Iterator[RedisServer]:
    """One Redis for all tests of a process; each test has keys of its own in it."""
    if redis.SERVER is None:
        pytest.skip("there is no redis-server on this machine")
    server = RedisServer(tmp_path_factory.mktemp("redis"))
    yield server
    server.stop()


KINDS = ["memory", "sqlite", pytest.param("redis", marks=pytest.mark.redis)]


def _address(request: pytest.FixtureRequest, file: Path) -> str:
    match request.param:
        case "sqlite":
            return f"sqlite:///{file}"
        case "redis":
            return request.getfixturevalue("redis_server").address(uuid.uuid4().hex)
    return "memory:"


@pytest.fixture(params=KINDS)
def address(request, tmp_path) -> str:
    """The address of an empty store of each kind."""
    return _address(request, tmp_path / "sessions.db")


@pytest.fixture(params=KINDS)
def other(request, tmp_path) -> str:
    """The address of another empty store of each kind."""
    return _address(request, tmp_path / "other.db")


@pytest.fixture(scope="module")
def model() -> nn.Module:
    torch.manual_seed(0)
    return Deep().eval()


@pytest.fixture
def http(model):
    with Engine(model) as engine, serving(engine) as url, httpx.Client(base_url=url, trust_env=False) as client:
        yield client


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 8 MiB."""
    with disk.small_disk(tmp_path / "disk") as folder:
        if folder is None:
            pytest.skip("file systems cannot be mounted here")
        yield folder
