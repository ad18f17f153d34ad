"""A session as a file: its state as safetensors, and beside it which model and input it belongs to."""

from __future__ import annotations

import json
from typing import Any

from ..errors import StateFileError

_KEY = "hiddenstate.session"


def with_facts(data: bytes, facts: dict[str, Any]) -> bytes:
    """Return a safetensors file with `facts` among its metadata."""
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    header["__metadata__"] = {**header.get("__metadata__", {}), _KEY: json.dumps(facts)}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text + data[8 + length :]


def facts_of(data: bytes) -> dict[str, Any] | None:
    """Return the facts in a file, None where it has none."""
    try:
        length = int.from_bytes(data[:8], "little")
        found = json.loads(data[8 : 8 + length]).get("__metadata__", {}).get(_KEY)
        facts = None if found is None else json.loads(found)
    except (ValueError, AttributeError, UnicodeDecodeError, RecursionError, MemoryError) as error:
        raise StateFileError(f"these bytes are no safetensors file: {error}") from error
    if facts is not None and not (
        isinstance(facts, dict)
        and isinstance(facts.get("fingerprint"), str)
        and all(type(facts.get(key)) is int and 0 <= facts[key] < 2**62 for key in ("seq", "steps"))
    ):
        raise StateFileError(
            "these bytes say that they hold a session, but not of which model, or not how far it came."
        )
    return facts
