"""The gateway: tokens, and limits for each caller."""

import json
import time

import httpx
import pytest
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import connect

from hiddenstate.errors import StoreFailed
from hiddenstate.serve import Engine
from hiddenstate.serve.stores import MemoryStore
from tests.support.deadline import wait_until
from tests.support.web import serving

TOKENS = {"alice": "alices secret", "bob": "bobs secret"}


@pytest.fixture
def guarded(model):
    """A server that wants tokens, has low limits, and two clients of it."""
    limits = {"body": 2000, "steps": 5, "new_sessions": 8}
    with (
        Engine(model) as engine,
        serving(engine, tokens=TOKENS, **limits) as url,
        httpx.Client(base_url=url, headers={"authorization": "Bearer alices secret"}, trust_env=False) as alice,
        httpx.Client(base_url=url, headers={"authorization": "bearer bobs secret"}, trust_env=False) as bob,
    ):
        yield alice, bob


def test_without_a_token_there_is_nothing_to_see(guarded):
    alice, _ = guarded
    for headers in ({}, {"authorization": "Bearer wrong"}, {"authorization": "alices secret"}):
        for path in ("/v1/sessions", "/v1/sessions/a", "/v1/sessions/a/state"):
            answer = httpx.get(f"{alice.base_url}{path}".replace("//v1", "/v1"), headers=headers, trust_env=False)
            assert answer.status_code == 401
            assert answer.headers["www-authenticate"] == "Bearer"


def test_one_caller_cannot_reach_anothers_session(guarded):
    alice, bob = guarded
    alice.put("/v1/sessions/a")
    alice.post("/v1/sessions/a/steps", json={"x": [1, 2, 3]})
    for method, path in [
        ("GET", ""),
        ("DELETE", ""),
        ("GET", "/state"),
        ("POST", "/fork"),
        ("POST", "/reset"),
    ]:
        for name in ("a", "alice:a", ":a"):
            answer = bob.request(method, f"/v1/sessions/{name}{path}")
            assert answer.status_code == 404, (method, path, name)
            assert "alice" not in answer.text.replace(name, "")
    assert bob.post("/v1/sessions/a/steps", json={"x": [1, 2, 3]}).status_code == 404
    assert bob.get("/v1/sessions").json() == {"sessions": []}
    assert bob.put("/v1/sessions/a").status_code == 201  # his own, of the same name
    assert alice.get("/v1/sessions/a").json()["seq"] == 1
    assert alice.get("/v1/sessions").json() == {"sessions": ["a"]}


def test_a_body_over_the_limit_is_413(guarded):
    alice, _ = guarded
    alice.put("/v1/sessions/a")

    def endless():
        for _ in range(100):
            yield b" " * 100

    for content in (b" " * 2001, endless()):
        assert alice.post("/v1/sessions/a/steps", content=content).status_code == 413


def test_too_many_steps_are_413(guarded):
    alice, _ = guarded
    alice.put("/v1/sessions/a")
    answer = alice.post("/v1/sessions/a/steps", json={"x": [[1, 2, 3]] * 6})
    assert answer.status_code == 413
    assert "6 steps, and at most 5" in answer.json()["error"]["message"]
    assert alice.post("/v1/sessions/a/steps", json={"x": [[1, 2, 3]] * 5}).status_code == 200


def test_new_sessions_come_at_a_limited_rate_for_each_caller(guarded):
    alice, bob = guarded
    began = time.monotonic()
    answers = [alice.post("/v1/sessions").status_code for _ in range(30)]
    seconds = time.monotonic() - began
    assert 8 <= answers.count(201) <= 8 + 8 * seconds + 1
    assert set(answers) <= {201, 429}
    assert bob.post("/v1/sessions").status_code == 201


def test_what_goes_on_with_a_session_does_not_count_as_a_new_one(guarded):
    alice, _ = guarded
    alice.put("/v1/sessions/a")
    state = alice.get("/v1/sessions/a/state").content
    for _ in range(12):
        assert alice.put("/v1/sessions/a?exist_ok=true").status_code == 201
        assert alice.post("/v1/sessions/a/steps?open=true", json={"x": [1, 2, 3]}).status_code == 200
        assert alice.put("/v1/sessions/a").status_code == 409
        assert alice.post("/v1/sessions/a/fork", json={"id": "a"}).status_code == 409
        assert alice.put("/v1/sessions/a/state", content=state).status_code == 200
        url = f"{alice.base_url}/v1/sessions/a/stream?open=true".replace("http", "ws")
        with connect(url, proxy=None, additional_headers={"authorization": "Bearer alices secret"}) as socket:
            assert json.loads(socket.recv(timeout=10))["type"] == "ready"
    for _ in range(6):
        assert alice.post("/v1/sessions").status_code == 201


def test_inputs_come_at_the_rate_of_their_caller(model):
    tokens = {"slow": {"token": "a", "inputs": 3}, "fast": "b"}
    with Engine(model) as engine, serving(engine, tokens=tokens, inputs=1000) as url:
        for token, most in (("a", 3), ("b", 1000)):
            with httpx.Client(base_url=url, headers={"authorization": f"Bearer {token}"}, trust_env=False) as http:
                http.put("/v1/sessions/s")
                began = time.monotonic()
                answers = [http.post("/v1/sessions/s/steps", json={"x": [1, 2, 3]}) for _ in range(20)]
                statuses = [answer.status_code for answer in answers]
                assert set(statuses) <= {200, 429}
                assert min(20, most) <= statuses.count(200) <= most * (1 + time.monotonic() - began) + 1
                refused = [answer for answer in answers if answer.status_code == 429]
                assert all("more than 3 inputs a second" in answer.text for answer in refused)
                assert all(int(answer.headers["retry-after"]) >= 1 for answer in refused)


def test_a_caller_has_so_many_streams_at_once(model):
    with Engine(model) as engine, serving(engine, streams=1) as url:
        address = f"{url.replace('http', 'ws')}/v1/sessions/a/stream?open=true"
        with connect(address, proxy=None) as first:
            first.recv(timeout=10)
            with connect(address, proxy=None) as second:
                assert "more than 1 streams at once" in json.loads(second.recv(timeout=10))["message"]
                with pytest.raises(ConnectionClosed) as closed:
                    second.recv(timeout=10)
                assert closed.value.rcvd.code == 4429
        wait_until(lambda: _talks(address))


def _talks(address: str) -> bool:
    with connect(address, proxy=None) as socket:
        return json.loads(socket.recv(timeout=10))["type"] == "ready"


def test_json_that_is_longer_than_any_input_is_refused_before_it_is_read(model):
    with Engine(model) as engine, serving(engine, steps=10) as url, httpx.Client(base_url=url, trust_env=False) as http:
        http.put("/v1/sessions/a")
        big = b'{"x": [' + b"1," * 200_000 + b"1]}"
        for path in ("/v1/sessions/a/steps", "/v2/models/m/infer"):
            answer = http.post(path, content=big)
            assert answer.status_code == 413
            assert "send them as bytes" in answer.text
        headers = {"inference-header-content-length": str(len(big))}
        assert http.post("/v2/models/m/infer", content=big, headers=headers).status_code == 413
        with connect(f"{url.replace('http', 'ws')}/v1/sessions/a/stream", proxy=None) as socket:
            socket.recv(timeout=10)
            socket.send(big.decode())
            assert "at most" in json.loads(socket.recv(timeout=10))["message"]
            socket.send('{"type": "info"}')
            assert json.loads(socket.recv(timeout=10))["type"] == "ready"


class Gone(MemoryStore):
    """A store that can be away."""

    away = False

    def others_wrote(self) -> bool:
        self.check()
        return False

    def check(self) -> None:
        if self.away:
            raise StoreFailed("the store could not be reached")


def test_without_its_store_a_server_is_not_ready_and_streams_say_why(model):
    store = Gone()
    with Engine(model, store) as engine, serving(engine) as url, httpx.Client(base_url=url, trust_env=False) as http:
        http.put("/v1/sessions/a")
        store.away = True
        for path in ("/readyz", "/v2/health/ready", "/v2/models/m/ready"):
            answer = http.get(path)
            assert answer.status_code == 503
            assert "could not be reached" in answer.text
        assert http.get("/healthz").status_code == 200
        with connect(f"{url.replace('http', 'ws')}/v1/sessions/a/stream", proxy=None) as socket:
            assert json.loads(socket.recv(timeout=10))["kind"] == "StoreFailed"
            with pytest.raises(ConnectionClosed) as closed:
                socket.recv(timeout=10)
            assert closed.value.rcvd.code == 4503
        store.away = False
        assert http.get("/readyz").status_code == 200
