"""The gateway: tokens, and limits for each caller."""

import time

import httpx
import pytest

from hiddenstate.errors import BadInput
from hiddenstate.serve import Engine
from hiddenstate.serve.web.gateway import RateLimit, Tokens
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


def test_tokens_alone_name_their_callers_by_a_hash():
    tokens = Tokens(["one", "two"])
    assert tokens.caller("Bearer one") != tokens.caller("Bearer two")
    assert tokens.caller("Bearer three") is None
    assert tokens.caller(None) is None
    assert Tokens(None).caller(None) == ""
    assert Tokens([]).caller("Bearer ") is None


@pytest.mark.parametrize("tokens", ["secret", {"a:b": "secret"}, {"": "secret"}])
def test_tokens_that_cannot_be_told_apart_are_refused(tokens):
    with pytest.raises(BadInput, match=r"token|colons"):
        Tokens(tokens)


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


def test_a_rate_fills_up_again():
    now = 0.0
    rate = RateLimit(2.0, clock=lambda: now)
    assert [rate.take("a") for _ in range(3)] == [True, True, False]
    now = 0.6
    assert [rate.take("a") for _ in range(2)] == [True, False]
    now = 100.0
    assert [rate.take("a") for _ in range(3)] == [True, True, False]
