"""Sessions in a Redis that several workers share; each session is changed by one of them at a time."""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from urllib.parse import parse_qsl, urlencode, urlsplit, urlunsplit

from ...errors import BadInput, MissingExtra, StoreFailed
from .store import Busy, Change, Claim, Row, Store

_LEASE = 2.0
_FIELDS = ("version", "seq", "steps", "opened", "touched", "fingerprint", "state")

# The scripts that run inside Redis, each as one transaction. A session is a hash with the fields version (the epoch of
# the last change), seq, steps, opened, touched, fingerprint, state, the answers a0, a1 and so on, and those of its
# lease: epoch, holder, until.

_CLAIM = """
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local counter = KEYS[#KEYS]
local found = {}
for i = 1, #KEYS - 1 do
  local is = redis.call('HMGET', KEYS[i], 'version', 'until', 'holder')
  if not is[1] then
    found[i] = false
  elseif is[2] and tonumber(is[2]) > now and is[3] ~= ARGV[1] then
    found[i] = {-1, tonumber(is[2]) - now}
  else
    local epoch = redis.call('INCR', counter)
    redis.call('HSET', KEYS[i], 'epoch', epoch, 'holder', ARGV[1], 'until', now + tonumber(ARGV[2]))
    if is[1] == ARGV[2 + i] then
      found[i] = {epoch, is[1]}
    else
      local row = redis.call('HMGET', KEYS[i], 'seq', 'steps', 'opened', 'touched', 'fingerprint', 'state')
      found[i] = {epoch, is[1], row[1], row[2], row[3], row[4], row[5], row[6]}
    end
  end
end
return found
"""

_COMMIT = """
local names, touched, counter = KEYS[#KEYS - 2], KEYS[#KEYS - 1], KEYS[#KEYS]
local life = tonumber(ARGV[1])
local versions = {}
local at = 3
for i = 1, #KEYS - 3 do
  local key = KEYS[i]
  local session, token, gone, anew = ARGV[at], ARGV[at + 1], ARGV[at + 2] == '1', ARGV[at + 3] == '1'
  local seq, fingerprint, stateful = ARGV[at + 4], ARGV[at + 8], ARGV[at + 9] == '1'
  local is = redis.call('HMGET', key, 'epoch', 'seq', 'fingerprint', 'version')
  local fits
  if token == '' then
    fits = not is[4]
  else
    fits = is[4] and is[1] == token
    if fits and not gone and not anew and is[2] ~= seq then
      fits = tonumber(is[2]) + 1 == tonumber(seq) and is[3] == fingerprint
    end
  end
  if not fits then
    versions[i] = -1
  elseif gone then
    redis.call('DEL', key)
    redis.call('ZREM', names, session)
    redis.call('ZREM', touched, session)
    versions[i] = 0
  else
    local version = token
    if token == '' then version = redis.call('INCR', counter) end
    if anew then redis.call('DEL', key) end
    redis.call('HSET', key, 'version', version, 'epoch', '', 'until', 0, 'seq', seq, 'steps', ARGV[at + 5],
      'opened', ARGV[at + 6], 'touched', ARGV[at + 7], 'fingerprint', fingerprint)
    if stateful then redis.call('HSET', key, 'state', ARGV[at + 10]) else redis.call('HDEL', key, 'state') end
    if ARGV[at + 11] ~= '' then redis.call('HSET', key, ARGV[at + 11], ARGV[at + 12]) end
    if life > 0 then redis.call('PEXPIRE', key, life) else redis.call('PERSIST', key) end
    redis.call('ZADD', names, 0, session)
    redis.call('ZADD', touched, ARGV[at + 7], session)
    versions[i] = tonumber(version)
  end
  at = at + 13
end
return versions
"""

_RELEASE = """
for i, key in ipairs(KEYS) do
  if redis.call('HGET', key, 'epoch') == ARGV[i] then redis.call('HSET', key, 'until', 0) end
end
"""

_SWEEP = """
local old = redis.call('ZRANGEBYSCORE', KEYS[2], '-inf', '(' .. ARGV[1], 'LIMIT', 0, tonumber(ARGV[2]))
for _, session in ipairs(old) do
  redis.call('DEL', ARGV[3] .. session)
  redis.call('ZREM', KEYS[1], session)
  redis.call('ZREM', KEYS[2], session)
end
return #old
"""


class RedisStore(Store):
    """Sessions in Redis, for any number of identical workers.

    For the length of a tick a worker holds a lease on the sessions in it, with an epoch that rises with every lease.
    A change is accepted only with the epoch it was made under, so a worker that was paused past its lease, or has died,
    cannot overwrite later changes. As durable as Redis is configured to be: `appendonly yes`, `appendfsync always`.
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
        # No automatic retries: the next claim shows whether a commit whose answer was lost took place.
        # Version 2 of the protocol, since every server speaks it.
        self._db: Any = redis.Redis.from_url(
            address, retry=Retry(NoBackoff(), 0), socket_timeout=5.0, socket_connect_timeout=2.0, protocol=2
        )
        self._scripts = {script: self._db.register_script(script) for script in (_CLAIM, _COMMIT, _RELEASE, _SWEEP)}
        with self._failing("be reached"):
            self._db.ping()

    def claim(self, wanted: Sequence[tuple[str, int]]) -> list[Claim | Busy | None]:
        """Lease each session that nobody else holds; rows whose version the caller knows are not sent."""
        keys = [self._key(session) for session, _ in wanted]
        known = [version for _, version in wanted]
        found = self._again(
            lambda: self._run(_CLAIM, [*keys, self._key("", "epoch")], [self._holder, self._lease_ms, *known])
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
            versions = self._run(_COMMIT, [*keys, *places], values)
        return [None if version < 0 else version for version in versions]

    def release(self, claims: Sequence[tuple[str, int]]) -> None:
        """Give leases back; those that cannot be given back end by themselves."""
        try:
            self._run(_RELEASE, [self._key(session) for session, _ in claims], [token for _, token in claims])
        except self._errors:
            return

    def read(self, session: str) -> Row | None:
        """Read a session without a lease."""
        found = self._again(lambda: self._db.hmget(self._key(session), _FIELDS))
        return None if found[0] is None else _row(found[1:])

    def answer(self, session: str, seq: int) -> Any:
        """Read the field in which the answer to `seq` is kept, unless a later one has replaced it."""
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
        """Return the size of that set."""
        return int(self._again(lambda: self._db.zcard(self._key("", "names"))))

    def sweep(self, before: float, limit: int) -> int:
        """Remove those touched longest ago; their states expire in Redis by themselves."""
        keys = [self._key("", "names"), self._key("", "touched")]
        with self._failing("sweep"):
            return int(self._run(_SWEEP, keys, [repr(before), limit, self._key("")]))

    def close(self) -> None:
        """Close the connections."""
        self._db.close()

    def _key(self, session: str, kind: str = "session") -> str:
        return f"{self._prefix}:{kind}:{session}"

    def _run(self, script: str, keys: Sequence[str], values: Sequence[Any]) -> Any:
        return self._scripts[script](keys=keys, args=values)

    def _again(self, ask: Any) -> Any:
        """Ask again once, where that does no harm: the first failure may be that of a connection long gone."""
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
