"""Callers: their names by bearer token, from a mapping, a file or the environment, and what each may use."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from ...errors import BadInput

ENVIRONMENT = "HIDDENSTATE_TOKENS"

Given: TypeAlias = "Mapping[str, Any] | Sequence[str] | None"

_log = logging.getLogger(__name__)
_LOOK_AGAIN = 1.0  # seconds after which a file of tokens is looked at again
_OWN_LIMITS = ("new_sessions", "inputs", "streams")


@dataclass(frozen=True, slots=True)
class Caller:
    """Somebody who may call, and the limits that are its own in place of the general ones."""

    name: str  # empty where no token is needed
    new_sessions: float | None = None
    inputs: float | None = None
    streams: float | None = None


NOBODY = Caller("")


class Tokens:
    """Callers by bearer token. Without tokens, everybody is the same nameless caller.

    A caller may have several tokens, as while one takes the place of another: its sessions belong to its name.

    >>> tokens = Tokens({"alice": ["old", "new"], "bob": {"token": "other", "inputs": 10}})
    >>> tokens.caller("Bearer new").name, tokens.caller("Bearer other").inputs, tokens.caller("Bearer none")
    ('alice', 10.0, None)
    """

    def __init__(self, tokens: Given = None) -> None:
        """Take `{name: token}`, or tokens alone, each of which gives its caller a hash for a name."""
        if isinstance(tokens, str):
            raise BadInput("tokens is one string, but a mapping of names to tokens, or a list of tokens, is needed.")
        named = tokens if isinstance(tokens, Mapping) else {_digest(t).hex()[:16]: t for t in tokens or []}
        self._callers = dict(_callers(named))
        self.needed = tokens is not None

    def caller(self, authorization: str | None) -> Caller | None:
        """Return the caller, None where the token is wrong."""
        if not self.needed:
            return NOBODY
        kind, _, token = (authorization or "").partition(" ")
        # By its hash, so that the time the lookup takes reveals nothing about the token.
        return self._callers.get(_digest(token.strip())) if kind.lower() == "bearer" else None


class TokenFile(Tokens):
    """Callers by the tokens in a file, which is read again when it has changed: tokens come and go without a restart.

    A line is `name: token`, once for each token; `#` begins a comment. Or the file is JSON, as `Tokens` takes it.
    """

    def __init__(self, path: str, *, clock: Callable[[], float] = time.monotonic) -> None:
        """Read the file."""
        self._path, self._clock, self._looked = path, clock, clock()
        self._stamp = _stamp(path)
        self._emptied: tuple[int, int, int] | None = None  # as it was when it was first seen without tokens
        super().__init__(_read(path))

    def caller(self, authorization: str | None) -> Caller | None:
        """Return the caller by the tokens that are in the file now."""
        if self._clock() - self._looked >= _LOOK_AGAIN:
            self._looked = self._clock()
            try:
                if (stamp := _stamp(self._path)) != self._stamp:
                    self._read_again(stamp)
            except BadInput as error:  # half written, or gone: those that were known go on
                _log.warning("the tokens stay as they were: %s", error)
        return super().caller(authorization)

    def _read_again(self, stamp: tuple[int, int, int]) -> None:
        found = dict(_callers(_read(self._path, empty=True)))
        if not found and stamp != self._emptied:
            self._emptied = stamp  # it may be about to be written: only one that stays so revokes everybody
            return
        self._callers, self._stamp = found, stamp
        _log.info("read the tokens in %s again: %d", self._path, len(found))


def open_tokens(given: Given | Tokens, *, file: str | None = None) -> Tokens:
    """Return the tokens that are given, in a file, or else in the environment variable `HIDDENSTATE_TOKENS`."""
    if isinstance(given, Tokens):
        return given
    if file is not None:
        if given is not None:
            raise BadInput("tokens are given twice, in a file and directly: one of them is enough.")
        return TokenFile(file)
    if given is None and (text := os.environ.get(ENVIRONMENT, "").strip()):
        return Tokens(_parsed(text.replace(";", "\n"), f"the variable {ENVIRONMENT}"))
    return Tokens(given)


def _stamp(path: str) -> tuple[int, int, int]:
    try:
        found = os.stat(path)
    except OSError as error:
        raise BadInput(f"the file of tokens {path} cannot be read: {error.strerror}.") from error
    return found.st_mtime_ns, found.st_size, found.st_ino


def _read(path: str, *, empty: bool = False) -> Mapping[str, Any]:
    try:
        with open(path, encoding="utf-8") as file:
            return _parsed(file.read(), path, empty=empty)
    except (OSError, UnicodeDecodeError) as error:
        raise BadInput(f"the file of tokens {path} cannot be read: {error}.") from error


def _parsed(text: str, source: str, *, empty: bool = False) -> Mapping[str, Any]:
    """Return the tokens in a text: JSON, or lines `name: token`; `empty` says that there may be none."""
    if text.lstrip().startswith("{"):
        try:
            found = json.loads(text)
        except ValueError as error:
            raise BadInput(f"{source} is no JSON: {error}") from error
        if not empty and not list(_callers(found)):
            raise BadInput(f"{source} has no tokens: one is needed for each caller.")
        return dict(found)
    named: dict[str, list[str]] = {}
    for number, line in enumerate(text.splitlines(), 1):
        if line.strip() and not line.lstrip().startswith("#"):
            name, colon, token = line.partition(":")
            if not colon or not name.strip() or not token.strip():
                raise BadInput(f"line {number} of {source} is not of the form 'name: token'.")
            named.setdefault(name.strip(), []).append(token.strip())
    if not named and not empty:
        raise BadInput(f"{source} has no tokens: a line 'name: token' is needed for each caller.")
    return named


def _callers(named: Mapping[str, Any]) -> Iterator[tuple[bytes, Caller]]:
    """Yield each token's hash, with its caller."""
    seen: dict[bytes, str] = {}
    for name, given in named.items():
        if not isinstance(name, str) or not name or ":" in name:
            raise BadInput(f"the name of a caller is a string without colons, but one is {name!r}.")
        facts = given if isinstance(given, Mapping) else {"token": given}
        tokens: Any = facts.get("token", facts.get("tokens", ()))
        own = {key: value for key, value in facts.items() if key not in ("token", "tokens")}
        if not all(key in _OWN_LIMITS and _is_limit(value) for key, value in own.items()):
            raise BadInput(f"caller {name!r} has {own}, but its limits are numbers: {', '.join(_OWN_LIMITS)}.")
        for token in [tokens] if isinstance(tokens, str) or not isinstance(tokens, Sequence) else tokens:
            digest = _digest(token.strip()) if isinstance(token, str) and token.strip() else None
            if digest is None or seen.setdefault(digest, name) != name:
                raise BadInput(f"a token of caller {name!r} is empty, is no string, or is another caller's as well.")
            yield digest, Caller(name, **{key: float(value) for key, value in own.items()})


def _is_limit(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value > 0


def _digest(token: str) -> bytes:
    return hashlib.sha256(token.encode("utf-8", "surrogateescape")).digest()


class RateLimit:
    """A token bucket for each caller, filled at a steady rate."""

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        """Start with full buckets."""
        self._clock = clock
        self._buckets: dict[str, tuple[float, float]] = {}  # caller -> what is left, when

    def take(self, caller: str, a_second: float, count: int = 1) -> float:
        """Count `count` more, and return 0; or where that is more than `a_second`, the seconds until they may come.

        What one second allows may come at once, and one that alone is more than that comes when the bucket is full.
        """
        now = self._clock()
        most = max(1.0, a_second)
        left, then = self._buckets.get(caller, (most, now))
        left = min(most, left + (now - then) * a_second)
        short = min(count, most) - left
        self._buckets[caller] = (left if short > 1e-9 else left - count, now)
        return max(0.0, short / a_second) if short > 1e-9 else 0.0

    def give_back(self, caller: str) -> None:
        """Uncount one."""
        if caller in self._buckets:
            left, then = self._buckets[caller]
            self._buckets[caller] = (left + 1, then)
