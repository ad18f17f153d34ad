"""The server: REST, tokens, limits, health and numbers."""

import dataclasses
import threading
import time

import httpx
import pytest
import safetensors.torch
import torch
from torch import nn

import hiddenstate as hs
from hiddenstate.errors import BadInput
from hiddenstate.serve import Engine, app
from hiddenstate.serve.web.limits import Rate, Tokens
from tests.support.models import Deep, TimeFirst
from tests.support.web import serving

BINARY = {"content-type": "application/octet-stream"}
TOKENS = {"alice": "alices secret", "bob": "bobs secret"}


@pytest.fixture(scope="module")
def model() -> nn.Module:
    torch.manual_seed(0)
    return Deep().eval()


@pytest.fixture
def http(model):
    with Engine(model) as engine, serving(engine) as url, httpx.Client(base_url=url, trust_env=False) as client:
        yield client


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


def binary(x: torch.Tensor) -> bytes:
    return safetensors.torch.save({"x": x})


def test_a_session_over_rest_equals_one_call(http, model):
    x = torch.randn(7, 3)
    with torch.no_grad():
        wanted = model(x.unsqueeze(0))[0]
    opened = http.post("/v1/sessions", json={"id": "a"})
    assert opened.status_code == 201
    assert opened.json()["id"] == "a"
    first = http.post("/v1/sessions/a/steps", json={"x": x[0].tolist(), "seq": 1})
    assert first.json()["seq"] == 1
    second = http.post("/v1/sessions/a/steps", content=binary(x[1:4]), headers=BINARY)
    assert second.headers["x-seq"] == "2"
    third = http.post("/v1/sessions/a/steps?seq=3", json={"x": x[4:].tolist()})
    got = [
        torch.tensor([first.json()["y"]]),
        safetensors.torch.load(second.content)["y"],
        torch.tensor(third.json()["y"]),
    ]
    torch.testing.assert_close(torch.cat(got), wanted, rtol=1e-5, atol=1e-6)
    again = http.post("/v1/sessions/a/steps?seq=3", json={"x": [0, 0, 0]})
    assert again.json() == third.json()
    facts = http.get("/v1/sessions/a").json()
    assert (facts["seq"], facts["steps"], facts["hot"]) == (3, 7, True)


def test_sessions_are_resources(http):
    name = http.post("/v1/sessions").json()["id"]
    assert len(name) == 32
    assert http.put("/v1/sessions/b").status_code == 201
    assert http.put("/v1/sessions/b").json()["error"]["kind"] == "SessionExists"
    assert http.put("/v1/sessions/b?exist_ok=true").status_code == 201
    assert http.get("/v1/sessions").json() == {"sessions": sorted([name, "b"])}
    http.post("/v1/sessions/b/steps", json={"x": [1, 2, 3]})
    forked = http.post("/v1/sessions/b/fork", json={"id": "c"})
    assert (forked.status_code, forked.json()["seq"]) == (201, 1)
    assert len(http.post("/v1/sessions/b/fork").json()["id"]) == 32
    assert http.post("/v1/sessions/b/reset").status_code == 204
    assert http.delete("/v1/sessions/b").status_code == 204
    assert http.get("/v1/sessions/b").status_code == 404
    assert http.get("/v1/sessions?prefix=c&limit=1").json() == {"sessions": ["c"]}


def test_a_state_is_downloaded_and_put_back(http, tmp_path):
    x = torch.randn(3)
    http.put("/v1/sessions/a")
    http.post("/v1/sessions/a/steps", content=binary(x), headers=BINARY)
    state = http.get("/v1/sessions/a/state")
    assert state.headers["content-type"] == "application/octet-stream"
    (tmp_path / "state").write_bytes(state.content)
    assert hs.load(tmp_path / "state").batch == 1
    put = http.put("/v1/sessions/b/state", content=state.content)
    assert (put.status_code, put.json()["seq"]) == (200, 1)
    answers = [http.post(f"/v1/sessions/{name}/steps", json={"x": [1, 2, 3]}).json() for name in "ab"]
    assert answers[0] == answers[1]
    shown = http.get("/v1/sessions/a/state", headers={"accept": "application/json"}).json()
    assert sorted(shown["parts"]) == ["encoder.lstm.c", "encoder.lstm.h", "gru.h"]
    assert http.put("/v1/sessions/b/state", content=b"\x80nonsense").status_code == 400


def test_an_unknown_session_is_404_unless_it_may_be_begun(http):
    lost = http.post("/v1/sessions/nobody/steps", json={"x": [1, 2, 3]})
    assert lost.status_code == 404
    assert lost.json()["error"]["kind"] == "SessionLost"
    assert lost.json()["error"]["reason"] == "unknown"
    assert http.post("/v1/sessions/nobody/steps?open=true", json={"x": [1, 2, 3]}).json()["seq"] == 1
    assert http.post("/v1/sessions/nobody/steps?open=true", json={"x": [1, 2, 3]}).json()["seq"] == 2


def test_a_gap_is_409_and_says_how_far_the_session_is(http):
    http.put("/v1/sessions/a")
    gap = http.post("/v1/sessions/a/steps", json={"x": [1, 2, 3], "seq": 5})
    assert gap.status_code == 409
    assert gap.json()["error"]["seq"] == 0


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"{", "no JSON"),
        (b"[" * 100_000, "no JSON"),
        (b"[1, 2]", "a JSON object with"),
        (b'{"x": "abc"}', "not made of numbers"),
        (b'{"x": [[1, 2, 3], [1]]}', "cannot be made a tensor"),
        (b'{"x": [1, 2]}', "one step of this model has (3,)"),
        (b'{"x": []}', "one step of this model has (3,)"),
        (b'{"x": [1, 2, true]}', "not made of numbers"),
        (b'{"x": [1, 2, 3], "seq": 0}', "numbered from 1"),
        (b'{"x": [1, 2, 3], "seq": "1"}', "numbered from 1"),
        (b'{"x": [1, 2, 1' + b"0" * 400 + b"]}", "tensor"),
    ],
)
def test_nonsense_is_400_with_a_reason(http, body, message):
    http.put("/v1/sessions/a?exist_ok=true")
    answer = http.post("/v1/sessions/a/steps", content=body)
    assert answer.status_code == 400
    assert message in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"", "no safetensors"),
        (b"\x80\x04nonsense", "no safetensors"),
        (safetensors.torch.save({"z": torch.zeros(3)}), "one tensor named 'x'"),
        (binary(torch.zeros(3, dtype=torch.complex64)), "cast would lose"),
    ],
)
def test_binary_nonsense_is_400_with_a_reason(http, body, message):
    http.put("/v1/sessions/a?exist_ok=true")
    answer = http.post("/v1/sessions/a/steps", content=body, headers=BINARY)
    assert answer.status_code == 400
    assert message in answer.json()["error"]["message"]


def test_nan_is_422_and_the_session_goes_on(http):
    http.put("/v1/sessions/a")
    failed = http.post("/v1/sessions/a/steps", content=binary(torch.full((3,), torch.nan)), headers=BINARY)
    assert failed.status_code == 422
    assert failed.json()["error"]["kind"] == "ModelFailed"
    assert http.post("/v1/sessions/a/steps", json={"x": [1, 2, 3], "seq": 1}).status_code == 200


def test_several_outputs_are_named_by_their_place():
    with Engine(TimeFirst()) as engine, serving(engine) as url, httpx.Client(base_url=url, trust_env=False) as http:
        http.put("/v1/sessions/a")
        answer = http.post("/v1/sessions/a/steps", content=binary(torch.zeros(2, 3)), headers=BINARY)
        assert {name: t.shape for name, t in safetensors.torch.load(answer.content).items()} == {
            "y.0": (2, 2),
            "y.1": (2, 4),
        }
        assert len(http.post("/v1/sessions/a/steps", json={"x": [[0, 0, 0]]}).json()["y"]) == 2


def test_health_and_numbers(http):
    assert http.get("/healthz").json() == {"status": "alive"}
    assert http.get("/readyz").json()["status"] == "ready"
    http.put("/v1/sessions/a")
    http.post("/v1/sessions/a/steps", json={"x": [1, 2, 3]})
    lines = dict(line.rsplit(" ", 1) for line in http.get("/metrics").text.splitlines() if not line.startswith("#"))
    assert float(lines["hiddenstate_inputs_total"]) == 1
    assert float(lines["hiddenstate_hot_sessions"]) == 1
    assert float(lines['hiddenstate_latency_seconds{quantile="0.99"}']) > 0
    assert http.get("/v1/stats").json()["inputs"] == 1


# Tokens.


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


# Limits.


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
    rate = Rate(2.0, clock=lambda: now)
    assert [rate.take("a") for _ in range(3)] == [True, True, False]
    now = 0.6
    assert [rate.take("a") for _ in range(2)] == [True, False]
    now = 100.0
    assert [rate.take("a") for _ in range(3)] == [True, True, False]


def test_a_full_store_is_503_with_a_time_to_wait(model):
    with Engine(model, max_stored=1) as engine, serving(engine) as url:
        httpx.put(f"{url}/v1/sessions/a", trust_env=False)
        full = httpx.put(f"{url}/v1/sessions/b", trust_env=False)
    assert full.status_code == 503
    assert full.headers["retry-after"] == "1"
    assert full.json()["error"]["kind"] == "Overloaded"


# The end.


def test_shutting_down_answers_what_is_under_way(model):
    class Slow(Deep):
        def forward(self, x):
            time.sleep(0.2 if slow else 0)
            return super().forward(x)

    slow = False
    answers = []
    with Engine(Slow()) as engine:
        with serving(engine) as url:
            httpx.put(f"{url}/v1/sessions/a", trust_env=False)
            slow = True
            threads = [
                threading.Thread(
                    target=lambda: answers.append(
                        httpx.post(f"{url}/v1/sessions/a/steps", json={"x": [1, 2, 3]}, trust_env=False, timeout=20)
                    )
                )
                for _ in range(3)
            ]
            for thread in threads:
                thread.start()
            while engine.pending + engine.stats().inputs < 3:  # until all have arrived
                time.sleep(0.01)
        for thread in threads:
            thread.join()
    assert sorted(answer.json()["seq"] for answer in answers) == [1, 2, 3]


def test_the_description_of_the_interface_comes_with_it(http):
    description = http.get("/openapi.json").json()
    assert {"/v1/sessions/{session}/steps", "/v1/sessions/{session}/state", "/v2/models/{model}/infer"} <= set(
        description["paths"]
    )


def test_an_app_can_be_made_of_any_engine(model):
    with Engine(model) as engine:
        made = app(engine, steps=3)
        assert dataclasses.asdict(made.state.desk.limits)["steps"] == 3
        assert made.state.desk.limits.window == 8
