"""The application: what it describes, what it is made of, and how it ends."""

import dataclasses
import threading
import time

import httpx

from hiddenstate.serve import Engine, app
from tests.support.models import Deep
from tests.support.web import serving


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
        assert dataclasses.asdict(made.state.gateway.limits)["steps"] == 3
        assert made.state.gateway.limits.window == 8
