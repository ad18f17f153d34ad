"""What a server logs, and how: as text, or as one JSON object a line."""

from __future__ import annotations

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


def log_config(level: str, form: str) -> dict[str, Any]:
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
        "handlers": {"stderr": {"class": "logging.StreamHandler", "formatter": "line"}},
        "loggers": {name: logger for name in ("uvicorn", "hiddenstate")},
    }
