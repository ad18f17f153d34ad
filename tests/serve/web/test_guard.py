"""Pages of others, and names that were made to lead here."""

import json
import re
import socket

import httpx
import pytest
from websockets.exceptions import InvalidStatus
from websockets.sync.client import connect

from hiddenstate.errors import BadInput
from hiddenstate.serve import Engine, app
from tests.support.web import serving


@pytest.fixture(scope="module")
def url(request):
    from tests.support.models import Deep

    with Engine(Deep()) as engine, serving(engine) as url:
        engine.open("a")
        yield url


def ask(url: str, method: str = "GET", path: str = "/v1/sessions/a", **headers: str) -> httpx.Response:
    return httpx.request(method, url + path, headers=headers, trust_env=False)


@pytest.mark.parametrize("name", ["evil.example", "localhost.evil.example", "127.0.0.1.evil.example", "host:80", ""])
def test_a_name_that_was_made_to_lead_here_is_refused(url, name):
    for path in ("/v1/sessions/a", "/v1/sessions", "/metrics", "/", "/docs"):
        answer = ask(url, path=path, host=name)
        assert answer.status_code in (400, 421)
    for method, path in [("POST", "/v1/sessions/a/reset"), ("DELETE", "/v1/sessions/a")]:
        assert ask(url, method, path, host=name).status_code in (400, 421)
    assert ask(url).json()["seq"] == 0


@pytest.mark.parametrize("name", ["localhost", "localhost:80", "LOCALHOST", "127.0.0.1", "10.1.2.3:8080", "[::1]:1"])
def test_an_address_and_the_local_name_are_answered(url, name):
    assert ask(url, host=name).status_code == 200


@pytest.mark.parametrize("origin", ["https://evil.example", "null", "http://127.0.0.1:1", "file://"])
def test_a_page_of_somebody_else_is_refused(url, origin):
    for method, path in [("GET", ""), ("POST", "/reset"), ("POST", "/steps"), ("DELETE", "")]:
        answer = ask(url, method, f"/v1/sessions/a{path}", origin=origin)
        assert answer.status_code == 403
        assert "--allow-origin" in answer.json()["error"]["message"]
    with pytest.raises(InvalidStatus, match="403"):
        connect(f"{url.replace('http', 'ws')}/v1/sessions/a/stream", proxy=None, origin=origin)


def test_the_servers_own_page_is_answered(url):
    assert ask(url, origin=url).status_code == 200
    with connect(f"{url.replace('http', 'ws')}/v1/sessions/a/stream", proxy=None, origin=url) as socket:
        assert json.loads(socket.recv(timeout=10))["type"] == "ready"


def test_names_and_pages_that_are_allowed(model):
    options = {"hosts": ["served.example"], "origins": ["https://page.example"]}
    with Engine(model) as engine, serving(engine, **options) as url:
        assert ask(url, path="/healthz", host="served.example").status_code == 200
        assert ask(url, path="/healthz", host="other.example").status_code == 421
        seen = ask(url, path="/healthz", origin="https://page.example")
        assert seen.headers["access-control-allow-origin"] == "https://page.example"
        asked = {"origin": "https://page.example", "access-control-request-method": "POST"}
        asked["access-control-request-headers"] = "authorization"
        assert ask(url, "OPTIONS", "/v1/sessions", **asked).status_code == 200
        assert ask(url, path="/healthz", origin="https://other.example").status_code == 403


def test_with_tokens_any_name_leads_here_but_foreign_pages_do_not(model):
    with Engine(model) as engine, serving(engine, tokens={"alice": "secret"}) as url:
        token = {"authorization": "Bearer secret", "host": "load.balancer"}
        assert ask(url, path="/v1/sessions", **token).status_code == 200
        assert ask(url, path="/v1/sessions", **token, origin="https://evil.example").status_code == 403


def test_a_large_body_where_a_small_one_is_wanted_is_413(url):
    def endless():
        for _ in range(100):
            yield b" " * 1000

    for content in (b" " * 70_000, endless()):
        answer = httpx.post(f"{url}/v1/sessions", content=content, trust_env=False)
        assert answer.status_code == 413


@pytest.mark.parametrize("deep", [480, 940, 20_000])
def test_a_small_body_of_lists_within_lists_is_400(url, deep):
    for content in ("[" * deep + "]" * deep, '{"id": ' + "[" * deep + "]" * deep + "}"):
        headers = {"content-type": "application/json"}
        answer = httpx.post(f"{url}/v1/sessions", content=content, headers=headers, trust_env=False)
        assert answer.status_code == 400


@pytest.mark.parametrize(
    ("head", "status"),
    [
        ("GET /readyz HTTP/1.0", 200),  # a probe that says no name
        ("GET /v1/sessions HTTP/1.1\r\nHost: [", 400),
        ("GET /v1/sessions HTTP/1.1\r\nHost: [::1", 400),
        ("GET /v1/sessions HTTP/1.1\r\nHost: [x]", 400),
        ("GET /v1/sessions HTTP/1.1\r\nHost: a]b[", 400),
        ("GET /v1/sessions HTTP/1.1\r\nHost: localhost\r\nOrigin: http://[", 400),
        ("GET /v1/sessions HTTP/1.1\r\nHost: localhost\r\nOrigin: http://[x]/", 400),
        ("GET /v1/sessions HTTP/1.1\r\nHost: localhost:99999999", 200),
        ("GET /v1/sessions HTTP/1.1\r\nHost: localhost\r\nOrigin: null", 403),
    ],
)
def test_whatever_is_said_in_place_of_a_name_it_is_an_answer(url, head, status):
    port = int(url.rpartition(":")[2])
    with socket.create_connection(("127.0.0.1", port), timeout=10) as talk:
        talk.sendall(f"{head}\r\nConnection: close\r\n\r\n".encode())
        said = talk.makefile("rb").read()
    assert int(said.split()[1]) == status
    if status == 400 and b"{" in said:
        assert b"is no address" in said


@pytest.mark.parametrize(
    ("allowed", "message"),
    [
        ({"origins": ["page.example"]}, "the page to allow is 'page.example', but its origin is needed"),
        ({"origins": ["https://page.example/app"]}, "but its origin is needed, as https://example.org:8443"),
        ({"origins": ["https://*.page.example"]}, "but its origin is needed"),
        ({"hosts": ["served.example:8080"]}, "the name to allow is 'served.example:8080', but a name alone is needed"),
        ({"hosts": ["https://served.example"]}, "but a name alone is needed, as served.example.org"),
        ({"hosts": ["*.served.example"]}, "but a name alone"),
    ],
)
def test_names_and_pages_that_no_request_can_have_are_refused(model, allowed, message):
    with Engine(model) as engine, pytest.raises(BadInput, match=re.escape(message)):
        app(engine, **allowed)
