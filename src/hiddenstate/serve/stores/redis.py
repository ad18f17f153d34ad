"""Sessions in a Redis that several workers share; each session is changed by one of them at a time."""

from __future__ import annotations

import heapq
import secrets
import time
import uuid
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeAlias

from ...errors import SessionLost, StoreFailed
from .redis_address import RedisAddress
from .redis_scripts import CLAIM, COMMIT, RELEASE, SWEEP
from .store import RANDOM_BITS, Busy, Change, Claim, Row, Store, damaged, next_version

_BUCKETS = 256  # hash tags of a cluster: all keys of one are in one slot, and a session is in one bucket
_COUNTED = 1.0  # seconds for which the number of sessions in a cluster is remembered
_REPLICATED = 1000  # milliseconds that replicas have to confirm
_ALIVE = 1000  # milliseconds until what a check has written is gone
_FIELDS = ("version", "seq", "steps", "opened", "touched", "fingerprint", "state")

# What a script is called with: keys, all of one slot, and values.
_Asked: TypeAlias = "tuple[list[str], list[Any]]"


class RedisStore(Store):
    """Sessions in Redis, for any number of identical workers; by itself, behind Sentinels, or a Cluster.

    For the length of a tick a worker holds a lease on the sessions in it, with an epoch that differs from every other.
    A change is accepted only with the epoch it was made under, so a worker that was paused past its lease, or has died,
    cannot overwrite later changes. As durable as Redis is configured to be: `appendonly yes`, `appendfsync always`.
    A Cluster runs one transaction for each bucket of sessions, in place of one for each tick.
    """

    shared = True

    def __init__(self, address: str) -> None:
        """Connect; `?lease=` is the seconds a lease lasts, `?prefix=` stands before all keys."""
        place = RedisAddress.read(address)
        self._address, self._prefix, self._replicas = place.shown, place.prefix, place.replicas
        self._lease_ms = max(1, round(1e3 * place.lease))
        self._cluster = place.kind == "cluster"
        self._holder = uuid.uuid4().hex
        self._counted: tuple[float, int] | None = None  # of a cluster: when, and how many there were
        self._db, self._errors = place.connect()
        self._scripts = {} if self._cluster else {s: self._db.register_script(s) for s in (CLAIM, COMMIT, RELEASE)}
        with self._failing("be reached"):
            self._db.ping()
        # What has a time to live may be evicted: then the sweep alone removes sessions.
        self._evicts = place.evicts(self._db)

    def claim(self, wanted: Sequence[tuple[str, int]]) -> list[Claim | Busy | SessionLost | None]:
        """Lease each session that nobody else holds; rows whose version the caller knows are not sent."""
        each = [("" if v < 0 else _text(v), secrets.randbits(RANDOM_BITS) | 1) for _, v in wanted]
        names = [session for session, _ in wanted]
        asked = self._by_bucket(names, [self._holder, self._lease_ms], each)
        found = self._again(lambda: self._run(CLAIM, asked))
        return [_claim(session, reply) for session, reply in zip(names, self._ordered(names, found), strict=True)]

    def commit(self, changes: Sequence[Change]) -> list[int | None]:
        """Run all changes as one script, or one for each bucket: Redis does nothing else meanwhile."""
        life = 0 if self.ttl is None or self._evicts else max(1, round(2e3 * self.ttl))
        names = [change.session for change in changes]
        asked = self._by_bucket(names, [life], [self._values(change) for change in changes], ("names", "touched"))
        with self._failing("write"):
            versions = self._ordered(names, self._run(COMMIT, asked, write=True))
        if self._counted is not None:
            grown = sum((change.token is None) - (change.row is None) for change in changes)
            self._counted = self._counted[0], self._counted[1] + grown
        return [_number(version) if version else None for version in versions]

    def release(self, claims: Sequence[tuple[str, int]]) -> None:
        """Give leases back; those that cannot be given back end by themselves."""
        try:
            self._run(RELEASE, self._by_bucket([s for s, _ in claims], [], [(_text(token),) for _, token in claims]))
        except self._errors:
            return

    def read(self, session: str) -> Row | None:
        """Read a session without a lease."""
        key = self._key(session)
        try:
            found = self._again(lambda: self._db.hmget(key, _FIELDS))
        except StoreFailed as error:
            if self._again(lambda: self._db.type(key)) in (b"hash", b"none"):
                raise
            raise damaged(session) from error
        return None if found[0] is None else _row(session, found[1:])

    def answer(self, session: str, seq: int) -> Any:
        """Read the field in which the answer to `seq` is kept, unless a later one has replaced it."""
        found = self._again(lambda: self._db.hget(self._key(session), f"a{seq % max(1, self.replay)}"))
        if self._replicas and found is not None:
            with self._failing("write"):
                self._confirm()
        number, _, data = (found or b"").partition(b" ")
        return data if number == b"%d" % seq else None

    def sessions(self, prefix: str, after: str, limit: int) -> list[str]:
        """Read names along sorted sets."""
        start, low = b"[" + prefix.encode(), b"(" + after.encode()
        begin = low if after and after >= prefix else start if prefix else b"-"
        end = b"[" + prefix.encode() + b"\xff" if prefix else b"+"
        found = self._every("names", lambda pipe, key: pipe.zrangebylex(key, begin, end, start=0, num=limit))
        return [name.decode() for name, _ in zip(heapq.merge(*found), range(limit), strict=False)]

    def count(self) -> int:
        """Return the size of that set; of a cluster's, at most a second ago."""
        if self._counted is not None and time.monotonic() - self._counted[0] < _COUNTED:
            return self._counted[1]
        count = sum(map(int, self._every("names", lambda pipe, key: pipe.zcard(key))))
        self._counted = (time.monotonic(), count) if self._cluster else None
        return count

    def sweep(self, before: float, limit: int) -> int:
        """Remove those touched longest ago; their states expire in Redis by themselves."""
        old = self._every("touched", lambda pipe, key: pipe.zcount(key, "-inf", f"({before!r}"))
        gone = 0
        for bucket, count in enumerate(old):
            if count and gone < limit:
                keys = [self._index("names", bucket), self._index("touched", bucket)]
                with self._failing("sweep"):
                    where = self._index("session", bucket)
                    gone += int(self._db.eval(SWEEP, 2, *keys, repr(before), limit - gone, where))
        self._counted = None
        return gone

    def check(self) -> None:
        """Ask for a sign of life, and write: a replica answers, and so does a Redis whose memory is full."""
        with self._failing("be reached"):
            self._db.ping()
        with self._failing("write"):
            pipe = self._db.pipeline(transaction=False)
            for bucket in range(_BUCKETS if self._cluster else 1):  # which are on all nodes of a cluster
                pipe.set(self._index("alive", bucket), b"", px=_ALIVE)
            pipe.execute()

    def close(self) -> None:
        """Close the connections."""
        self._db.close()

    def _values(self, change: Change) -> Sequence[Any]:
        """Return what the script is told of a change."""
        row = change.row or Row(0, 0, 0.0, 0.0, "", None)
        kept = change.answer is not None and self.replay > 0
        token = "" if change.token is None else _text(change.token)
        return (
            change.session,
            token,
            token or _text(next_version()),  # the version after it
            int(change.row is None),
            int(change.anew),
            *(row.seq, row.seq - 1, row.steps, repr(row.opened), repr(row.touched), row.fingerprint),
            *(int(row.state is not None), row.state or b""),
            *((f"a{row.seq % self.replay}", b"%d " % row.seq + change.answer) if kept else ("", b"")),
        )

    # Keys and buckets: of a Redis by itself there is one bucket, number 0.

    def _bucket(self, session: str) -> int:
        return zlib.crc32(session.encode("utf-8", "surrogatepass")) % _BUCKETS if self._cluster else 0

    def _index(self, kind: str, bucket: int) -> str:
        return f"{self._prefix}:{{{bucket}}}:{kind}:" if self._cluster else f"{self._prefix}:{kind}:"

    def _key(self, session: str) -> str:
        return self._index("session", self._bucket(session)) + session

    def _by_bucket(
        self, names: Sequence[str], common: list[Any], each: Sequence[Iterable[Any]], indexes: Sequence[str] = ()
    ) -> list[_Asked]:
        """Return a call for each bucket in which there are some of these sessions, with what concerns each of them."""
        asked: dict[int, _Asked] = {}
        for session, values in zip(names, each, strict=True):
            bucket = self._bucket(session)
            keys, all_values = asked.setdefault(bucket, ([], list(common)))
            keys.append(self._index("session", bucket) + session)
            all_values.extend(values)
        for bucket, (keys, _) in asked.items():
            keys.extend(self._index(kind, bucket) for kind in indexes)
        return list(asked.values())

    def _ordered(self, names: Sequence[str], replies: list[list[Any]]) -> list[Any]:
        """Return the replies of all buckets in the order of the sessions."""
        buckets = list(map(self._bucket, names))
        by_bucket = dict(zip(dict.fromkeys(buckets), map(iter, replies), strict=True))
        return [next(by_bucket[bucket]) for bucket in buckets]

    def _run(self, script: str, asked: list[_Asked], *, write: bool = False) -> list[Any]:
        """Run a script once for each bucket, and return the reply of each."""
        if not asked:
            return []
        if not self._cluster and not (write and self._replicas):
            ((keys, values),) = asked
            return [self._scripts[script](keys=keys, args=values)]
        pipe = self._db.pipeline(transaction=False)
        for keys, values in asked:
            pipe.execute_command("EVAL", script, len(keys), *keys, *values)
        if write and self._replicas:
            pipe.wait(self._replicas, _REPLICATED)  # on the same connection: it is about what this one wrote
        replies = list(pipe.execute())
        if write and self._replicas:
            self._check_confirmed(replies.pop())
        return replies

    def _confirm(self) -> None:
        """Wait until replicas have all that was written before: an answer that is given again may be one they lack."""
        pipe = self._db.pipeline(transaction=False)
        pipe.incr(self._index("confirmed", 0))
        pipe.wait(self._replicas, _REPLICATED)
        self._check_confirmed(pipe.execute()[1])

    def _check_confirmed(self, confirmed: int) -> None:
        if confirmed < self._replicas:
            raise StoreFailed(
                f"the store {self._address} wrote, but {confirmed} of {self._replicas} replicas confirmed it within "
                f"{_REPLICATED / 1e3:g} s. Nothing was acknowledged; repeat an input with its seq to find out."
            )

    def _every(self, kind: str, ask: Callable[[Any, str], Any]) -> list[Any]:
        """Ask the same of one index in every bucket."""
        if not self._cluster:
            return [self._again(lambda: ask(self._db, self._index(kind, 0)))]

        def all_of_them() -> list[Any]:
            pipe = self._db.pipeline(transaction=False)
            for bucket in range(_BUCKETS):
                ask(pipe, self._index(kind, bucket))
            return list(pipe.execute())

        return list(self._again(all_of_them))

    def _again(self, ask: Callable[[], Any]) -> Any:
        """Ask again once, where that does no harm: the first failure may be that of a connection long gone."""
        try:
            with self.timed():
                return ask()
        except self._errors:
            with self._failing("read"):
                return ask()

    @contextmanager
    def _failing(self, verb: str) -> Iterator[None]:
        try:
            with self.timed():
                yield
        except self._errors as error:
            raise StoreFailed(
                f"the store {self._address} could not {verb}: {type(error).__name__}: {error}. Nothing was "
                f"acknowledged; an input that is repeated with its seq when Redis is back is applied once."
            ) from error


def _text(version: int) -> str:
    """Return a version as Redis has it; those of older editions are a count alone."""
    count, random = version >> RANDOM_BITS, version & ((1 << RANDOM_BITS) - 1)
    return f"{count}:{random}" if random else str(count)


def _number(version: bytes) -> int:
    count, _, random = version.partition(b":")
    return (int(count) << RANDOM_BITS) | int(random or 0)


def _claim(session: str, reply: Any) -> Claim | Busy | SessionLost | None:
    if reply is None:
        return None
    epoch, version, *row = reply
    if not epoch:
        return Busy(version / 1e3)
    try:
        known = _number(version)
        found = _row(session, row[1:]) if row else None
    except SessionLost as error:
        return Claim(_number(epoch), 0, None, damage=error)
    except ValueError as error:  # the version is none
        return Claim(_number(epoch), 0, None, damage=damaged(session, error))
    return Claim(_number(epoch), known, found, bool(row and row[0]))


def _row(session: str, found: Sequence[bytes | None]) -> Row:
    seq, steps, opened, touched, fingerprint, state = found
    try:
        times = float(opened or 0), float(touched or 0)
        return Row(int(seq or 0), int(steps or 0), times[0], times[1], (fingerprint or b"").decode(), state)
    except ValueError as error:
        raise damaged(session, error) from error
