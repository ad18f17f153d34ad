"""Who is calling: tokens from a mapping, a file or the environment, and rates for each caller."""

import json

import httpx
import pytest
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import connect

from hiddenstate.errors import BadInput
from hiddenstate.serve import Engine
from hiddenstate.serve.web.callers import NOBODY, RateLimit, TokenFile, Tokens, open_tokens
from tests.support.deadline import let_pass
from tests.support.web import serving


def test_tokens_alone_name_their_callers_by_a_hash():
    tokens = Tokens(["one", "two"])
    assert tokens.caller("Bearer one") != tokens.caller("Bearer two")
    assert tokens.caller("Bearer three") is None
    assert tokens.caller(None) is None
    assert Tokens(None).caller(None) is NOBODY
    assert Tokens([]).caller("Bearer ") is None


@pytest.mark.parametrize(
    "tokens",
    [
        "secret",
        {"a:b": "secret"},
        {"": "secret"},
        {"a": ""},
        {"a": 5},
        {"a": "same", "b": "same"},
        {"a": "same", "b": "same "},
        {"a": {"token": "x", "inputs": -1}},
        {"a": {"token": "x", "unknown": 1}},
    ],
)
def test_tokens_that_cannot_be_told_apart_are_refused(tokens):
    with pytest.raises(BadInput, match=r"token|colons|limits are numbers"):
        Tokens(tokens)


def test_a_caller_keeps_its_sessions_when_its_token_changes(model, tmp_path):
    now, path = [0.0], tmp_path / "tokens"
    path.write_text("# who may call\nalice: old\nbob: other\n")
    tokens = TokenFile(str(path), clock=lambda: now[0])

    def status(token: str, method: str = "GET") -> int:
        headers = {"authorization": f"Bearer {token}"}
        return httpx.request(method, f"{url}/v1/sessions/a", headers=headers, trust_env=False).status_code

    with Engine(model) as engine, serving(engine, tokens=tokens) as url:
        assert status("old", "PUT") == 201
        path.write_text("alice: old\nalice: new token\nbob: other\n")
        now[0] += 2
        assert [status(token) for token in ("old", "new token", "other")] == [200, 200, 404]
        path.write_text("alice: new token\n")
        now[0] += 2
        assert [status(token) for token in ("old", "new token", "other")] == [401, 200, 401]
        path.write_text("half a li")
        now[0] += 2
        assert status("new token") == 200  # what cannot be read changes nothing


def test_a_file_that_is_emptied_revokes_everybody_also_on_open_streams(model, tmp_path):
    now, path = [0.0], tmp_path / "tokens"
    path.write_text("alice: old\n")
    tokens = TokenFile(str(path), clock=lambda: now[0])
    with Engine(model) as engine, serving(engine, tokens=tokens) as url:
        headers = {"authorization": "Bearer old"}
        address = f"ws{url.removeprefix('http')}/v1/sessions/a/stream?open=true"
        with connect(address, additional_headers=headers, proxy=None) as stream:
            stream.recv(10)
            path.write_text("")
            now[0] += 2
            assert tokens.caller("Bearer old") is not None  # it may be about to be written
            now[0] += 2
            assert tokens.caller("Bearer old") is None
            let_pass(1.1)  # after which a stream looks again
            stream.send('{"type": "info"}')
            said = json.loads(stream.recv(10))
            assert said["message"] == "the bearer token of this stream is no longer one that this server knows."
            with pytest.raises(ConnectionClosed) as closed:
                stream.recv(10)
            assert closed.value.rcvd.code == 4401
        path.write_text("alice: new\n")
        now[0] += 2
        assert tokens.caller("Bearer new") is not None


def test_a_file_may_be_json_with_limits_for_each_caller(tmp_path):
    path = tmp_path / "tokens.json"
    path.write_text(json.dumps({"alice": ["a", "b"], "bob": {"token": "c", "inputs": 5, "streams": 2}}))
    tokens = open_tokens(None, file=str(path))
    assert tokens.caller("Bearer b").name == "alice"
    assert (tokens.caller("bearer c").inputs, tokens.caller("bearer c").streams) == (5, 2)


def test_tokens_in_the_environment(monkeypatch):
    monkeypatch.setenv("HIDDENSTATE_TOKENS", "alice: one; bob: two")
    assert open_tokens(None).caller("Bearer two").name == "bob"
    assert open_tokens({"carol": "three"}).caller("Bearer two") is None  # what is given comes first
    monkeypatch.setenv("HIDDENSTATE_TOKENS", "nonsense")
    with pytest.raises(BadInput, match=r"line 1 of the variable HIDDENSTATE_TOKENS is not of the form 'name: token'"):
        open_tokens(None)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "has no tokens"),
        ("# nothing", "has no tokens"),
        ("alice", "line 1"),
        ("a: b\n: c", "line 2"),
        ("{", "is no JSON"),
    ],
)
def test_a_file_without_tokens_is_refused(tmp_path, content, message):
    (tmp_path / "tokens").write_text(content)
    with pytest.raises(BadInput, match=message):
        TokenFile(str(tmp_path / "tokens"))


def test_tokens_given_twice_are_refused(tmp_path):
    with pytest.raises(BadInput, match="given twice"):
        open_tokens(["a"], file=str(tmp_path / "tokens"))


def test_a_rate_fills_up_again():
    now = 0.0
    rate = RateLimit(clock=lambda: now)
    assert [rate.take("a", 2.0) for _ in range(3)] == [0.0, 0.0, 0.5]
    assert rate.take("b", 2.0) == 0.0
    now = 0.6
    assert [rate.take("a", 2.0) == 0.0 for _ in range(2)] == [True, False]
    rate.give_back("a")
    assert rate.take("a", 2.0) == 0.0
    now = 100.0
    assert [rate.take("a", 2.0) == 0.0 for _ in range(3)] == [True, True, False]
