"""What a server logs, and how."""

import asyncio
import io
import json
import logging

import pytest

from hiddenstate.errors import BadInput
from hiddenstate.serve.logs import JsonFormatter, QuietFilter, log_config


def test_a_line_of_json_has_what_there_is_to_say():
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(JsonFormatter())
    logger = logging.Logger("hiddenstate.test")
    logger.addHandler(handler)
    logger.warning("session %r\nis lost", "ä")
    try:
        raise ValueError("why")
    except ValueError:
        logger.exception("it failed")
    first, second = map(json.loads, stream.getvalue().splitlines())
    assert (first["level"], first["logger"], first["message"]) == (
        "warning",
        "hiddenstate.test",
        "session 'ä'\nis lost",
    )
    assert first["time"].endswith("Z")
    assert "ValueError: why" in second["traceback"]


@pytest.mark.parametrize(("level", "form"), [("loud", "text"), ("info", "xml")])
def test_logs_of_no_known_kind_are_refused(level, form):
    with pytest.raises(BadInput, match="'text' or 'json' from debug, info"):
        log_config(level, form)


def test_what_is_no_news_has_no_line():
    def lets(message, *, access=False, error=None):
        record = logging.LogRecord("uvicorn.error", logging.INFO, "", 0, message, (), None)
        record.exc_info = None if error is None else (type(error), error, None)
        return QuietFilter(access=access).filter(record)

    assert lets("Application startup complete.")
    assert lets("Exception in ASGI application\n", error=ValueError())
    assert not lets("Exception in ASGI application\n", error=asyncio.CancelledError())
    for message in ('%s - "WebSocket %s" [accepted]', "connection open", "connection closed"):
        assert not lets(message)
        assert lets(message, access=True)
