"""Errors as HTTP answers."""

import httpx
import pytest
from starlette.requests import HTTPConnection

from hiddenstate.errors import (
    BadInput,
    ModelFailed,
    Overloaded,
    SequenceGap,
    SessionExists,
    SessionLost,
    StateMismatch,
    StoreFailed,
)
from hiddenstate.serve import Engine
from hiddenstate.serve.web.http_errors import facts_of, status_of
from tests.support.web import serving


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (SessionLost("gone", "unknown"), 404),
        (SessionLost("gone", "expired"), 410),
        (SessionLost("gone", "damaged"), 410),
        (SessionLost("gone", "model"), 409),
        (SessionExists("there"), 409),
        (SequenceGap("gap", 3), 409),
        (ModelFailed("NaN"), 422),
        (Overloaded("full"), 503),
        (StoreFailed("disk"), 503),
        (BadInput("nonsense"), 400),
        (StateMismatch("nonsense"), 400),
    ],
)
def test_every_error_has_the_status_that_fits(error, status):
    assert status_of(error) == status


def test_a_client_is_told_reason_and_number_and_its_own_name_for_the_session():
    connection = HTTPConnection({"type": "http", "state": {"caller": "alice"}})
    lost = facts_of(SessionLost("session 'alice:a' expired", "expired"), connection)
    assert lost == {"kind": "SessionLost", "message": "session 'a' expired", "reason": "expired"}
    assert facts_of(SequenceGap("gap", 3), connection)["seq"] == 3


@pytest.mark.parametrize("caller", ["r", "it", "x.y", "ValueError"])
def test_only_the_callers_name_in_front_of_a_session_is_left_out_of_a_message(caller):
    connection = HTTPConnection({"type": "http", "state": {"caller": caller}})
    said = "ValueError: the engine: it: xzy:a, session {!r} is lost"
    lost = facts_of(SessionLost(said.format(f"{caller}:it:a"), "unknown"), connection)
    assert lost["message"] == said.format("it:a")


def test_a_full_store_is_503_with_a_time_to_wait(model):
    with Engine(model, max_stored=1) as engine, serving(engine) as url:
        httpx.put(f"{url}/v1/sessions/a", trust_env=False)
        full = httpx.put(f"{url}/v1/sessions/b", trust_env=False)
    assert full.status_code == 503
    assert full.headers["retry-after"] == "1"
    assert full.json()["error"]["kind"] == "Overloaded"
