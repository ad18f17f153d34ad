"""The application: what it describes, what it is made of, and how it ends."""

import dataclasses
import socket
import sqlite3
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

import httpx
import torch

from hiddenstate.serve import Engine, app
from hiddenstate.serve.stores.sqlite import SqliteStore
from tests.support.deadline import wait_until
from tests.support.models import Deep
from tests.support.web import serving


def test_shutting_down_answers_what_is_under_way():
    class Gated(Deep):
        def forward(self, x):
            assert gate.wait(20)
            return super().forward(x)

    def post() -> None:
        done = httpx.post(f"{url}/v1/sessions/a/steps", json={"x": [1, 2, 3]}, trust_env=False, timeout=20)
        answers.append(done.json()["seq"])

    def open_when_it_shuts_down() -> None:
        wait_until(lambda: refuses(url))
        gate.set()

    gate, answers = threading.Event(), []
    gate.set()
    with Engine(Gated()) as engine:
        engine.open("b")
        with serving(engine) as url:
            httpx.put(f"{url}/v1/sessions/a", trust_env=False)
            gate.clear()
            threads = [threading.Thread(target=engine.push, args=("b", torch.zeros(3)))]  # the model is busy with this
            threads[0].start()
            wait_until(lambda: engine.pending == 1)
            threads += [threading.Thread(target=post) for _ in range(3)]
            for thread in threads[1:]:
                thread.start()
            wait_until(lambda: engine.pending == 4)
            assert answers == []
            threads.append(threading.Thread(target=open_when_it_shuts_down))
            threads[-1].start()
        for thread in threads:
            thread.join()
    assert sorted(answers) == [1, 2, 3]


def refuses(url: str) -> bool:
    """Whether the server takes no more connections: it has begun to shut down."""
    try:
        socket.create_connection((httpx.URL(url).host, httpx.URL(url).port), timeout=1).close()
    except OSError:
        return True
    return False


def test_the_description_of_the_interface_comes_with_it(http):
    description = http.get("/openapi.json").json()
    assert {"/v1/sessions/{session}/steps", "/v1/sessions/{session}/state", "/v2/models/{model}/infer"} <= set(
        description["paths"]
    )


def test_an_app_can_be_made_of_any_engine(model):
    with Engine(model) as engine:
        made = app(engine, steps=3)
        assert dataclasses.asdict(made.state.gateway.limits)["steps"] == 3
        assert made.state.gateway.limits.window == 8


# Nothing that one request does keeps others waiting: in each of these it is under way until the test lets it go on.


def alive(url: str) -> bool:
    return httpx.get(f"{url}/healthz", trust_env=False, timeout=10).status_code == 200


def test_a_locked_database_holds_up_nobody_but_those_who_write(model, tmp_path):
    path = tmp_path / "sessions.db"
    with (
        Engine(model, SqliteStore(str(path), patience=60)) as engine,
        serving(engine) as url,
        ThreadPoolExecutor() as pool,
        closing(sqlite3.connect(path, isolation_level=None)) as other,
    ):
        httpx.put(f"{url}/v1/sessions/a", trust_env=False)
        for _ in range(10):  # until an event loop would run these by itself
            httpx.post(f"{url}/v1/sessions/a/steps", json={"x": [1, 2, 3]}, trust_env=False)
        other.execute("BEGIN IMMEDIATE")
        held = pool.submit(httpx.post, f"{url}/v1/sessions/a/steps", json={"x": [1, 2, 3]}, trust_env=False, timeout=60)
        wait_until(lambda: engine.pending == 1)
        assert alive(url)
        assert engine.pending == 1
        other.execute("ROLLBACK")
        assert held.result().json()["seq"] == 11


def test_a_long_input_holds_up_nobody(tmp_path):
    gate, entered = threading.Event(), threading.Event()

    class SlowOnLongInputs(Deep):
        def forward(self, x):
            if x.shape[1] >= 2000 and not gate.is_set():
                entered.set()
                assert gate.wait(60)
            return super().forward(x)

    with Engine(SlowOnLongInputs()) as engine, serving(engine) as url, ThreadPoolExecutor() as pool:
        for name in "ab":
            httpx.put(f"{url}/v1/sessions/{name}", trust_env=False)
        for _ in range(10):
            httpx.post(f"{url}/v1/sessions/a/steps", json={"x": [1, 2, 3]}, trust_env=False)
        body = {"x": [[1, 2, 3]] * 2000}
        held = pool.submit(httpx.post, f"{url}/v1/sessions/a/steps", json=body, trust_env=False, timeout=60)
        assert entered.wait(20)
        short = pool.submit(
            httpx.post, f"{url}/v1/sessions/b/steps", json={"x": [1, 2, 3]}, trust_env=False, timeout=60
        )
        assert alive(url)
        gate.set()
        assert held.result().status_code == short.result().status_code == 200
