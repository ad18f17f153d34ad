"""From a model to a server, and what is missing said so."""

import asyncio
import builtins

import httpx
import pytest
import torch

import hiddenstate as hs
from hiddenstate.errors import MissingExtra
from hiddenstate.serve import Client, Engine, app, run
from tests.support.models import Deep


@pytest.fixture
def without(monkeypatch):
    """Let an import fail, as where the extra is not installed."""
    real = builtins.__import__

    def hide(library: str) -> None:
        def missing(name, globals=None, locals=None, fromlist=(), level=0):
            if not level and name.partition(".")[0] == library:
                raise ModuleNotFoundError(f"No module named {library!r}", name=library)
            return real(name, globals, locals, fromlist, level)

        monkeypatch.setattr(builtins, "__import__", missing)

    return hide


def test_a_server_without_its_libraries_says_what_to_install(without):
    without("uvicorn")
    with pytest.raises(MissingExtra, match=r"a server needs uvicorn.*pip install 'hiddenstate\[serve\]'"):
        run(Deep(), store="memory:")


def test_a_client_without_its_libraries_says_what_to_install(without):
    without("httpx")
    with pytest.raises(MissingExtra, match=r"a client needs httpx: pip install 'hiddenstate\[serve\]'"):
        Client("http://127.0.0.1:1")


def test_redis_without_its_library_says_what_to_install(without):
    without("redis")
    with pytest.raises(MissingExtra, match=r"need the redis library.*pip install 'hiddenstate\[redis\]'"):
        Engine(Deep(), "redis://127.0.0.1:1/0")


def test_the_part_loads_on_first_use():
    assert hs.serve.Engine is Engine


def test_run_serves_until_it_is_told_to_stop(monkeypatch):
    import uvicorn

    seen = {}

    def stand_in(application, **options):
        seen.update(options, app=application)

    monkeypatch.setattr(uvicorn, "run", stand_in)
    model = Deep().train()
    run(model, store="memory:", port=0, tokens=["secret"], limits={"body": 123}, max_batch=7)
    assert seen["ws_max_size"] == 123
    assert seen["host"] == "127.0.0.1"
    assert model.training  # it was given back


def test_an_app_is_an_asgi_application():
    with Engine(Deep()) as engine:
        transport = httpx.ASGITransport(app(engine))

        async def ask() -> httpx.Response:
            async with httpx.AsyncClient(transport=transport, base_url="http://here") as client:
                await client.put("/v1/sessions/a")
                return await client.post("/v1/sessions/a/steps", json={"x": [[1, 2, 3]] * 2})

        assert torch.tensor(asyncio.run(ask()).json()["y"]).shape == (2, 2)
