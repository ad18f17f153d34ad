"""A session as callers see it: its name, what an engine says of it, and the file that it is exported to."""

from __future__ import annotations

import json
import uuid
from dataclasses import dataclass
from typing import Any

from ..errors import BadInput, SessionLost, StateFileError, StateMismatch
from ..state import State, from_bytes
from .futures import ResultFuture
from .model import ServedModel
from .session_operations import Import

LONGEST_NAME = 512
_KEY = "hiddenstate.session"  # in the metadata of an exported file


@dataclass(frozen=True, slots=True)
class Session:
    """A session as it is after the last input applied. Times are in seconds since the epoch."""

    id: str
    seq: int  # of the last input applied, 0 before the first
    steps: int  # applied in all
    opened: float
    touched: float  # when the last input was applied
    expires: float | None  # when it is lost unless an input comes; None: never
    fingerprint: str  # of the model its state belongs to
    hot: bool  # its state is in memory, rather than in the store alone

    @property
    def version(self) -> int | None:
        """The version of the model its state belongs to, None where it was served without one."""
        return version_of(self.fingerprint)


def version_of(fingerprint: str) -> int | None:
    """Return the version in front of a fingerprint, None where there is none.

    >>> version_of("v12-0f3a"), version_of("0f3a")
    (12, None)
    """
    version = fingerprint.partition("-")[0]
    return int(version[1:]) if version[:1] == "v" and version[1:].isdecimal() else None


def checked(session: str) -> str:
    """Return a session's name, or raise where it cannot be one."""
    if not isinstance(session, str) or not 0 < len(session) <= LONGEST_NAME:
        raise BadInput(
            f"the session is {str(session)[:40]!r} ({type(session).__name__}), but a name of 1 to {LONGEST_NAME} "
            f"characters is needed."
        )
    return session


def named(session: str | None) -> str:
    """Return a session's name; None gives a new, random one."""
    return uuid.uuid4().hex if session is None else checked(session)


def with_facts(data: bytes, facts: dict[str, Any]) -> bytes:
    """Return a safetensors file with `facts`, such as model and input number, added to its metadata."""
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    header["__metadata__"] = {**header.get("__metadata__", {}), _KEY: json.dumps(facts)}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text + data[8 + length :]


def read_import(
    session: str, future: ResultFuture, state: bytes | State, *, model: ServedModel, any_model: bool
) -> Import:
    """Return the operation that puts `session` into an exported or given state, or raise where that does not fit."""
    facts = None if isinstance(state, State) else _facts_of(bytes(state))
    if not isinstance(state, State):
        own = facts is not None and model.owns(facts["fingerprint"])
        if not own and not any_model:
            whose = "does not say which model it belongs to" if facts is None else f"belongs to {facts['fingerprint']}"
            raise SessionLost(
                f"the state for session {session!r} {whose}, and this model is {model.fingerprint}. If you "
                f"know that it fits, import it with any_model=True.",
                "model",
            )
        state = from_bytes(bytes(state), source=f"the state for session {session!r}")
    if state.batch != 1 or not model.format.fits(state):
        raise StateMismatch(
            f"the state for session {session!r} is {state!r}, but this model's are one row of {model.format!r}."
        )
    facts = facts or {}
    row = None if facts.get("anew") else model.format.rows(state)[0]
    return Import(checked(session), future, row=row, seq=facts.get("seq", 0), steps=facts.get("steps", 0))


def _facts_of(data: bytes) -> dict[str, Any] | None:
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
