"""A server's logs, as text or as one JSON object per line."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from typing import Any

from ..errors import BadInput

_LEVELS = ("debug", "info", "warning", "error", "critical")
_PLAIN = "%(asctime)s %(levelname)s %(name)s: %(message)s"


class JsonFormatter(logging.Formatter):
    """A record as one line of JSON: time, level, logger, message, and the traceback of an error."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line."""
        whole, part = divmod(record.created, 1)
        facts = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(whole)) + f".{int(part * 1000):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            facts["traceback"] = self.formatException(record.exc_info)
        return json.dumps(facts, ensure_ascii=False)


class QuietFilter(logging.Filter):
    """Leaves out what is no news: requests cut off by the end of the server, and unless wanted each WebSocket."""

    def __init__(self, *, access: bool) -> None:
        """Let a line for each WebSocket through with `access`."""
        super().__init__()
        self._access = access

    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether a record is worth a line."""
        if record.exc_info and isinstance(record.exc_info[1], asyncio.CancelledError):
            return False
        said = str(record.msg)
        socket = '"WebSocket' in said or said.startswith(("connection open", "connection closed", "connection reject"))
        return self._access or not (record.name.startswith("uvicorn") and record.levelno <= logging.INFO and socket)


def log_config(level: str, form: str, *, access: bool = False) -> dict[str, Any]:
    """Return the configuration of `logging` for a server, whose lines go to stderr."""
    if form not in ("text", "json") or level not in _LEVELS:
        raise BadInput(
            f"logs are {form!r} from {level!r} on, but 'text' or 'json' from {', '.join(_LEVELS)} is needed."
        )
    line: dict[str, Any] = {"format": _PLAIN} if form == "text" else {"()": "hiddenstate.serve.logs.JsonFormatter"}
    logger = {"handlers": ["stderr"], "level": level.upper(), "propagate": False}
    return {
        "version": 1,
        "disable_existing_loggers": False,
        "formatters": {"line": line},
        "filters": {"quiet": {"()": "hiddenstate.serve.logs.QuietFilter", "access": access}},
        "handlers": {"stderr": {"class": "logging.StreamHandler", "formatter": "line", "filters": ["quiet"]}},
        "loggers": {name: logger for name in ("uvicorn", "hiddenstate")},
    }
