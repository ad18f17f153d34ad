"""Health and numbers of a server."""

import httpx
import pytest
import torch

from hiddenstate.serve import Engine, app
from hiddenstate.serve.web import metrics_app
from tests.support.web import serving, serving_app


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


def numbers(text: str) -> dict[str, float]:
    return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in text.splitlines() if line[0] != "#")}


def test_histograms_say_where_the_time_went(model, tmp_path):
    with Engine(model, f"sqlite:///{tmp_path}/sessions.db") as engine, serving(engine) as url:
        engine.open("a")
        for _ in range(5):
            engine.push("a", torch.zeros(3))
        found = numbers(httpx.get(f"{url}/metrics", trust_env=False).text)
    for name in ("queue_wait", "answer", "model", "store"):
        whole = found[f"hiddenstate_{name}_seconds_count"]
        assert whole == found[f'hiddenstate_{name}_seconds_bucket{{le="+Inf"}}'] == 6
        buckets = [value for key, value in found.items() if key.startswith(f"hiddenstate_{name}_seconds_bucket")]
        assert buckets == sorted(buckets)
    assert found["hiddenstate_store_seconds_sum"] > 0
    assert found["hiddenstate_model_seconds_sum"] > 0
    parts = found["hiddenstate_model_seconds_sum"] + found["hiddenstate_store_seconds_sum"]
    assert parts <= found["hiddenstate_answer_seconds_sum"]


def test_numbers_are_behind_the_token_or_on_a_port_of_their_own(model):
    with Engine(model) as engine:
        made = app(engine, tokens={"alice": "secret"})
        with serving_app(made) as url, serving_app(metrics_app(made.state.gateway)) as other:
            for path in ("/metrics", "/v1/stats"):
                assert httpx.get(url + path, trust_env=False).status_code == 401
                token = {"authorization": "Bearer secret"}
                assert httpx.get(url + path, headers=token, trust_env=False).status_code == 200
                assert httpx.get(other + path, trust_env=False).status_code == 200
            for path in ("/healthz", "/readyz"):
                assert httpx.get(url + path, trust_env=False).status_code == 200
                assert httpx.get(other + path, trust_env=False).status_code == 200
            assert httpx.get(f"{other}/v1/sessions", trust_env=False).status_code == 404


@pytest.mark.parametrize("path", ["/healthz", "/readyz"])
def test_a_balancer_may_ask_for_the_head_alone(model, path):
    with Engine(model) as engine, serving(engine) as url:
        answer = httpx.head(url + path, trust_env=False)
    assert (answer.status_code, answer.content) == (200, b"")
