"""Sessions in a Redis that several workers share, each session changed by one of them at a time."""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from urllib.parse import parse_qsl, urlencode, urlsplit, urlunsplit

from ...errors import BadInput, MissingExtra, StoreFailed
from .scripts import CLAIM, COMMIT, RELEASE, SWEEP
from .store import Busy, Change, Claim, Row, Store

_LEASE = 2.0
_FIELDS = ("version", "seq", "steps", "opened", "touched", "fingerprint", "state")


class RedisStore(Store):
    """Sessions in Redis, for any number of identical workers.

    For the length of a tick a worker holds a lease on the sessions in it, with an epoch that rises with every lease.
    A change is taken only with the epoch it was made under, so a worker that was paused past its lease, or has died,
    cannot overwrite what came after. As durable as Redis is set up to be: `appendonly yes`, `appendfsync always`.
    """

    shared = True

    def __init__(self, address: str) -> None:
        """Connect; `?lease=` is the seconds a lease lasts, `?prefix=` stands before all keys."""
        try:
            import redis
            from redis.backoff import NoBackoff
            from redis.retry import Retry
        except ImportError as error:
            raise MissingExtra(
                "sessions in Redis need the redis library, which is not installed: pip install 'hiddenstate[redis]'."
            ) from error
        self._errors: tuple[type[Exception], ...] = (redis.RedisError, OSError)
        address, options = _options(address)
        self._address = address.rpartition("@")[2]  # without a password, for messages
        self._lease_ms = max(1, round(1e3 * options["lease"]))
        self._prefix = options["prefix"]
        self._holder = uuid.uuid4().hex
        # Never sent twice by itself: whether a commit whose answer was lost took place is for the next claim to see.
        # The second version of the protocol, since it is what every server speaks.
        self._db: Any = redis.Redis.from_url(
            address, retry=Retry(NoBackoff(), 0), socket_timeout=5.0, socket_connect_timeout=2.0, protocol=2
        )
        self._scripts = {script: self._db.register_script(script) for script in (CLAIM, COMMIT, RELEASE, SWEEP)}
        with self._failing("be reached"):
            self._db.ping()

    def claim(self, wanted: Sequence[tuple[str, int]]) -> list[Claim | Busy | None]:
        """Lease each session that nobody else holds; of those whose version is known, the row is not sent."""
        keys = [self._key(session) for session, _ in wanted]
        known = [version for _, version in wanted]
        found = self._again(
            lambda: self._run(CLAIM, [*keys, self._key("", "epoch")], [self._holder, self._lease_ms, *known])
        )
        return [_claim(reply) for reply in found]

    def commit(self, changes: Sequence[Change]) -> list[int | None]:
        """Run all changes as one script: Redis does nothing else meanwhile."""
        keys = [self._key(change.session) for change in changes]
        values: list[Any] = [0 if self.ttl is None else max(1, round(2e3 * self.ttl)), self._holder]
        for change in changes:
            row = change.row or Row(0, 0, 0.0, 0.0, "", None)
            kept = change.answer is not None and self.replay > 0
            values += [
                change.session,
                "" if change.token is None else change.token,
                int(change.row is None),
                int(change.anew),
                *(row.seq, row.steps, repr(row.opened), repr(row.touched), row.fingerprint),
                *(int(row.state is not None), row.state or b""),
                *((f"a{row.seq % self.replay}", b"%d " % row.seq + change.answer) if kept else ("", b"")),
            ]
        with self._failing("write"):
            places = [self._key("", "names"), self._key("", "touched"), self._key("", "epoch")]
            versions = self._run(COMMIT, [*keys, *places], values)
        return [None if version < 0 else version for version in versions]

    def release(self, claims: Sequence[tuple[str, int]]) -> None:
        """Give leases back; those that cannot be given back end by themselves."""
        try:
            self._run(RELEASE, [self._key(session) for session, _ in claims], [token for _, token in claims])
        except self._errors:
            return

    def read(self, session: str) -> Row | None:
        """Read a session without a lease."""
        found = self._again(lambda: self._db.hmget(self._key(session), _FIELDS))
        return None if found[0] is None else _row(found[1:])

    def answer(self, session: str, seq: int) -> Any:
        """Read what is kept in the place of `seq`, unless a later one is there."""
        found = self._again(lambda: self._db.hget(self._key(session), f"a{seq % max(1, self.replay)}"))
        number, _, data = (found or b"").partition(b" ")
        return data if number == b"%d" % seq else None

    def sessions(self, prefix: str, after: str, limit: int) -> list[str]:
        """Read names along a sorted set."""
        start, low = b"[" + prefix.encode(), b"(" + after.encode()
        begin = low if after and after >= prefix else start if prefix else b"-"
        end = b"[" + prefix.encode() + b"\xff" if prefix else b"+"
        found = self._again(lambda: self._db.zrangebylex(self._key("", "names"), begin, end, start=0, num=limit))
        return [name.decode() for name in found]

    def count(self) -> int:
        """Ask for the size of that set."""
        return int(self._again(lambda: self._db.zcard(self._key("", "names"))))

    def sweep(self, before: float, limit: int) -> int:
        """Remove those touched longest ago; Redis drops their states by itself when their time is over."""
        keys = [self._key("", "names"), self._key("", "touched")]
        with self._failing("sweep"):
            return int(self._run(SWEEP, keys, [repr(before), limit, self._key("")]))

    def close(self) -> None:
        """Close the connections."""
        self._db.close()

    def _key(self, session: str, kind: str = "session") -> str:
        return f"{self._prefix}:{kind}:{session}"

    def _run(self, script: str, keys: Sequence[str], values: Sequence[Any]) -> Any:
        return self._scripts[script](keys=keys, args=values)

    def _again(self, ask: Any) -> Any:
        """Ask what may be asked twice: the first failure may be that of a connection that was gone before."""
        try:
            return ask()
        except self._errors:
            with self._failing("read"):
                return ask()

    @contextmanager
    def _failing(self, verb: str) -> Iterator[None]:
        try:
            yield
        except self._errors as error:
            raise StoreFailed(
                f"the store {self._address} could not {verb}: {type(error).__name__}: {error}. Nothing was "
                f"acknowledged; an input that is repeated with its seq when Redis is back is applied once."
            ) from error


def _options(address: str) -> tuple[str, dict[str, Any]]:
    parts = urlsplit(address)
    query = dict(parse_qsl(parts.query))
    try:
        lease = float(query.pop("lease", _LEASE))
    except ValueError:
        raise BadInput(f"the lease in {address!r} is no number of seconds.") from None
    prefix = query.pop("prefix", "hiddenstate")
    return urlunsplit(parts._replace(query=urlencode(query))), {"lease": lease, "prefix": prefix}


def _claim(reply: Any) -> Claim | Busy | None:
    if reply is None:
        return None
    epoch, version, *row = reply
    if epoch < 0:
        return Busy(version / 1e3)
    return Claim(epoch, int(version), _row(row) if row else None)


def _row(found: Sequence[bytes | None]) -> Row:
    seq, steps, opened, touched, fingerprint, state = found
    times = float(opened or 0), float(touched or 0)
    return Row(int(seq or 0), int(steps or 0), times[0], times[1], (fingerprint or b"").decode(), state)
