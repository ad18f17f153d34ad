"""Errors as HTTP answers."""

import httpx

from hiddenstate.serve import Engine
from tests.support.web import serving


def test_a_full_store_is_503_with_a_time_to_wait(model):
    with Engine(model, max_stored=1) as engine, serving(engine) as url:
        httpx.put(f"{url}/v1/sessions/a", trust_env=False)
        full = httpx.put(f"{url}/v1/sessions/b", trust_env=False)
    assert full.status_code == 503
    assert full.headers["retry-after"] == "1"
    assert full.json()["error"]["kind"] == "Overloaded"
