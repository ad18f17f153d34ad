"""From a model to a server, and what is missing said so."""

import asyncio
import builtins
import shutil
import ssl
import subprocess

import httpx
import pytest
import torch
import uvicorn

import hiddenstate as hs
from hiddenstate.errors import BadInput, HiddenStateError, MissingExtra
from hiddenstate.serve import Client, Engine, Tls, app, run
from tests.support.models import Deep
from tests.support.redis import free_port
from tests.support.web import serving_app


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
    seen = []
    monkeypatch.setattr(uvicorn.Server, "run", lambda server: seen.append(server.config))
    model = Deep().train()
    run(model, store="memory:", port=0, tokens=["secret"], limits={"body": 123}, max_batch=7)
    (config,) = seen
    assert (config.ws_max_size, config.host, config.access_log) == (123, "127.0.0.1", False)
    assert config.timeout_graceful_shutdown <= 8
    assert model.training  # it was given back


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "", "192.168.1.1", "example.org"])
def test_a_server_that_others_can_reach_needs_tokens_or_a_word_that_it_does_not(host, monkeypatch):
    monkeypatch.delenv("HIDDENSTATE_TOKENS", raising=False)
    with pytest.raises(BadInput, match=r"no token.*HIDDENSTATE_TOKENS.*--insecure"):
        run(Deep(), store="memory:", host=host, check=True)
    run(Deep(), store="memory:", host=host, insecure=True, check=True)
    run(Deep(), store="memory:", host=host, tokens={"alice": "secret"}, check=True)
    monkeypatch.setenv("HIDDENSTATE_TOKENS", "alice: secret; bob: other")
    run(Deep(), store="memory:", host=host, check=True)


def test_a_check_looks_at_everything_and_leaves_nothing(tmp_path):
    run(Deep(), store=f"sqlite:///{tmp_path}/new.db", check=True)
    assert list(tmp_path.iterdir()) == []
    for wrong, message in [
        ({"store": f"sqlite:///{tmp_path}/missing/new.db"}, "cannot be opened"),
        ({"store": f"redis://127.0.0.1:{free_port()}/0"}, "could not be reached"),
        ({"token_file": f"{tmp_path}/tokens"}, "file of tokens .* cannot be read"),
        ({"tls": Tls(f"{tmp_path}/cert")}, "certificate .* cannot be used"),
        ({"limits": {"body": 0}}, "the limit body is 0"),
        ({"log_format": "xml"}, "'text' or 'json'"),
        ({"max_batch": 0}, "max_batch is 0"),
    ]:
        with pytest.raises(HiddenStateError, match=message):
            run(Deep(), **{"store": "memory:", "check": True, **wrong})


def test_a_store_that_is_there_is_still_there_after_a_check(tmp_path):
    address = f"sqlite:///{tmp_path}/sessions.db"
    with Engine(Deep(), address) as engine:
        engine.open("a")
    run(Deep(), store=address, check=True)
    with Engine(Deep(), address) as engine:
        assert engine.sessions() == ["a"]


def test_an_app_is_an_asgi_application():
    with Engine(Deep()) as engine:
        transport = httpx.ASGITransport(app(engine))

        async def ask() -> httpx.Response:
            async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
                await client.put("/v1/sessions/a")
                return await client.post("/v1/sessions/a/steps", json={"x": [[1, 2, 3]] * 2})

        assert torch.tensor(asyncio.run(ask()).json()["y"]).shape == (2, 2)


@pytest.fixture
def certificate(tmp_path):
    """A certificate for 127.0.0.1 and its key, which has a password."""
    if shutil.which("openssl") is None:
        pytest.skip("there is no openssl on this machine")
    made, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    line = [
        "openssl",
        "req",
        "-x509",
        "-newkey",
        "rsa:2048",
        "-subj",
        "/CN=127.0.0.1",
        "-days",
        "2",
        "-passout",
        "pass:pw",
    ]
    files = ["-addext", "subjectAltName=IP:127.0.0.1", "-keyout", str(key), "-out", str(made)]
    subprocess.run([*line, *files], check=True, capture_output=True)
    return str(made), str(key)


def test_a_server_with_a_certificate_talks_to_those_who_trust_it(certificate, monkeypatch):
    made, key = certificate
    with pytest.raises(BadInput, match=r"certificate .* cannot be used"):
        run(Deep(), store="memory:", check=True, tls=Tls(made, key, "another"))
    seen = []
    monkeypatch.setattr(uvicorn.Server, "run", lambda server: seen.append(server.config))
    run(Deep(), store="memory:", tls=Tls(made, key, "pw"))
    monkeypatch.undo()
    (config,) = seen
    options = {name: getattr(config, name) for name in ("ssl_certfile", "ssl_keyfile", "ssl_keyfile_password")}
    with Engine(Deep()) as engine, serving_app(app(engine), **options) as url:
        secure = url.replace("http:", "https:")
        trusting = ssl.create_default_context(cafile=made)
        assert httpx.get(f"{secure}/healthz", verify=trusting, trust_env=False).json() == {"status": "alive"}
        with pytest.raises(httpx.ConnectError, match="CERTIFICATE_VERIFY_FAILED"):
            httpx.get(f"{secure}/healthz", trust_env=False)


def test_a_server_may_want_certificates_of_its_clients(certificate):
    made, key = certificate
    options = Tls(made, key, "pw", client_ca=made).options()
    with Engine(Deep()) as engine, serving_app(app(engine), **options) as url:
        secure, trusting = url.replace("http:", "https:"), ssl.create_default_context(cafile=made)
        with pytest.raises(httpx.TransportError):
            httpx.get(f"{secure}/healthz", verify=trusting, trust_env=False)
        trusting.load_cert_chain(made, key, "pw")
        assert httpx.get(f"{secure}/healthz", verify=trusting, trust_env=False).status_code == 200
