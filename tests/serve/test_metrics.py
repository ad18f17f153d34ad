"""Health and numbers of a server."""


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
