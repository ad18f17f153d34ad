"""From a model to a server, and what is missing said so."""

import asyncio
import builtins
import os
import shutil
import socket
import ssl
import subprocess
import sys
from contextlib import ExitStack

import httpx
import pytest
import torch
import uvicorn

import hiddenstate as hs
from hiddenstate.errors import BadInput, HiddenStateError, MissingExtra, Overloaded
from hiddenstate.serve import Client, Engine, Tls, app, run, server
from hiddenstate.serve.web import metrics_app
from tests.support.models import Deep
from tests.support.redis import free_port
from tests.support.web import ROOT, serving_app


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
    monkeypatch.setattr(uvicorn.Server, "run", lambda server, sockets: seen.append(server.config))
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
    monkeypatch.setattr(server, "_bound", lambda *_: [])  # this machine has not all of these addresses
    run(Deep(), store="memory:", host=host, insecure=True, check=True)
    run(Deep(), store="memory:", host=host, tokens={"alice": "secret"}, check=True)
    monkeypatch.setenv("HIDDENSTATE_TOKENS", "alice: secret; bob: other")
    run(Deep(), store="memory:", host=host, check=True)


def test_a_check_looks_at_everything_and_leaves_nothing(tmp_path):
    taken = socket.create_server(("127.0.0.1", 0))
    port = taken.getsockname()[1]
    run(Deep(), store=f"sqlite:///{tmp_path}/new.db", port=0, metrics_port=0, check=True)
    assert list(tmp_path.iterdir()) == []
    for wrong, message in [
        ({"store": f"sqlite:///{tmp_path}/missing/new.db"}, "cannot be opened"),
        ({"store": f"redis://127.0.0.1:{free_port()}/0"}, "could not be reached"),
        ({"token_file": f"{tmp_path}/tokens"}, "file of tokens .* cannot be read"),
        ({"tls": Tls(f"{tmp_path}/cert")}, "certificate .* cannot be used"),
        ({"limits": {"body": 0}}, "the limit body is 0"),
        ({"log_format": "xml"}, "'text' or 'json'"),
        ({"max_batch": 0}, "max_batch is 0"),
        ({"port": port}, f"cannot listen on 127.0.0.1 port {port}: Address already in use.*--metrics-port"),
        ({"metrics_port": port}, f"cannot listen on 127.0.0.1 port {port}"),
        ({"port": 99999}, "the port is 99999, but a number from 0 to 65535"),
        ({"metrics_port": -1}, "the port is -1, but"),
        ({"port": 54321, "metrics_port": 54321}, "port for metrics is 54321, which is that of the server itself"),
        ({"host": "no.such.invalid", "insecure": True}, r"cannot listen on 'no.such.invalid', which leads to no addr"),
        ({"host": "203.0.113.1", "insecure": True}, "cannot listen on 203.0.113.1 port 0: Cannot assign"),
    ]:
        with pytest.raises(HiddenStateError, match=message):
            run(Deep(), **{"store": "memory:", "check": True, "port": 0, **wrong})
    taken.close()


def test_a_store_that_is_there_is_still_there_after_a_check(tmp_path):
    address = f"sqlite:///{tmp_path}/sessions.db"
    with Engine(Deep(), address) as engine:
        engine.open("a")
    run(Deep(), store=address, port=0, check=True)
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
    monkeypatch.setattr(uvicorn.Server, "run", lambda server, sockets: seen.append(server.config))
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


def test_a_port_that_is_taken_is_one_line_and_the_exit_status_of_a_mistake(tmp_path):
    (tmp_path / "m.py").write_text("import torch\n\ndef make():\n    return torch.nn.GRU(2, 3, batch_first=True)\n")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        line = [sys.executable, "-m", "hiddenstate", "serve", f"{tmp_path}/m.py:make", "--store", "memory:"]
        environment = {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}"}
        for more in ([], ["--check"]):
            ran = subprocess.run([*line, "--port", f"{port}", *more], env=environment, capture_output=True, text=True)
            assert ran.returncode == 2
            assert ran.stdout == ""
            assert ran.stderr.count("\n") == 1
            assert f"cannot listen on 127.0.0.1 port {port}: Address already in use" in ran.stderr


def test_all_addresses_of_a_name_are_bound_to_one_port_and_one_that_is_not_there_is_left_out(monkeypatch):
    found = [
        (socket.AF_INET6, socket.SOCK_STREAM, 6, "", ("2001:db8::1", 0, 0, 0)),
        (socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", 0)),
        (socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.2", 0)),
    ]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: found)
    with ExitStack() as stack:
        made = server._bound("any", 0, stack)
        names = [one.getsockname() for one in made]
    assert [name for name, _ in names] == ["127.0.0.1", "127.0.0.2"]
    assert len({port for _, port in names}) == 1


def test_the_second_port_drains_and_counts_versions_but_not_for_pages_of_others():
    with Engine(Deep(), version=3) as engine:
        engine.open("a")
        gateway = app(engine).state.gateway
        with serving_app(metrics_app(gateway)) as url, httpx.Client(base_url=url, trust_env=False) as web:
            assert web.get("/v1/versions").json() == {engine.fingerprint: 1}
            assert web.post("/v1/drain", headers={"origin": "http://evil.example"}).status_code == 403
            assert web.post("/v1/drain", headers={"host": "evil.example"}).status_code == 421
            engine.open("b")
            assert web.post("/v1/drain").status_code == 204
            with pytest.raises(Overloaded, match="being drained"):
                engine.open("c")
