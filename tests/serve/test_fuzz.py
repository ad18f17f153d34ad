"""Requests that nobody would write: no 500, no crash."""

import pytest
import schemathesis
import torch
from hypothesis import HealthCheck, given, settings
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error

from hiddenstate.serve import Engine, app
from tests.support.models import Deep

pytestmark = pytest.mark.long


def endless(inner):
    """The application without its end: the tool starts and ends it around every request."""

    async def application(scope, receive, send) -> None:
        if scope["type"] != "lifespan":
            await inner(scope, receive, send)
            return
        for event in ("startup", "shutdown"):
            await receive()
            await send({"type": f"lifespan.{event}.complete"})

    return application


@pytest.fixture(scope="module")
def engine():
    torch.manual_seed(0)
    with Engine(Deep(), max_stored=100_000) as made:
        yield made


def test_no_request_is_answered_by_a_server_error(engine):
    schema = schemathesis.openapi.from_asgi(
        "/openapi.json", endless(app(engine, body=10_000, new_sessions=1e9, hosts=["*"]))
    )
    tried = set()
    for found in schema.get_all_operations():
        operation = found.ok()

        @settings(max_examples=12, suppress_health_check=list(HealthCheck))
        @given(case=operation.as_strategy() | operation.as_strategy(GenerationMode.NEGATIVE))
        def check(case: schemathesis.Case) -> None:
            case.call_and_validate(checks=[not_a_server_error])

        check()
        tried.add(operation.label)
    assert len(tried) > 15
    assert "POST /v1/sessions/{session}/steps" in tried


def test_afterwards_it_serves_as_before(engine):
    assert engine.push(engine.open(), torch.zeros(3)).shape == (2,)
    assert engine.stats().ticks > 0
