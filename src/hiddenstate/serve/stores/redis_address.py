"""The address of a Redis: by itself, behind Sentinels, or a Cluster; and the client that talks to it."""

from __future__ import annotations

from typing import Any, NamedTuple
from urllib.parse import parse_qsl, unquote, urlencode, urlsplit, urlunsplit

from ...errors import BadInput, MissingExtra, StoreFailed

_LEASE = 2.0  # seconds


class RedisAddress(NamedTuple):
    """Where a Redis is: `redis://host:port/number`, `redis+sentinel://hosts/service`, `redis+cluster://hosts`."""

    url: str
    kind: str  # "", "sentinel" or "cluster"
    lease: float
    prefix: str
    replicas: int  # that must have a change before it is acknowledged

    @staticmethod
    def read(address: str) -> RedisAddress:
        """Split an address into what this library reads and what the redis library does."""
        parts = urlsplit(address)
        query = dict(parse_qsl(parts.query))
        scheme, _, kind = parts.scheme.partition("+")
        try:
            lease, replicas = float(query.pop("lease", _LEASE)), int(query.pop("replicas", 0))
        except ValueError:
            raise BadInput(
                f"the lease in {_shown(address)!r} is no number of seconds, or replicas no number."
            ) from None
        if kind not in ("", "sentinel", "cluster") or (kind == "sentinel" and not parts.path.strip("/")):
            raise BadInput(
                f"the store is {_shown(address)!r}, but redis://host:port/number, redis+sentinel://host:port,host:port/"
                f"service or redis+cluster://host:port,host:port is needed."
            )
        if replicas and kind == "cluster":
            raise BadInput("replicas= is not taken for a cluster: use its own min-replicas-to-write.")
        prefix = query.pop("prefix", "hiddenstate")
        url = urlunsplit(parts._replace(scheme=scheme, query=urlencode(query)))
        return RedisAddress(url, kind, lease, prefix, replicas)

    @property
    def shown(self) -> str:
        """The address without a password, for messages."""
        return _shown(self.url)

    @property
    def hosts(self) -> list[tuple[str, int]]:
        """The hosts that are named, each with its port."""
        found = []
        for one in urlsplit(self.url).netloc.rpartition("@")[2].split(","):
            host, _, port = one.rpartition(":") if ":" in one else (one, "", "")
            default = 26379 if self.kind == "sentinel" else 6379
            if port and not port.isdecimal():
                raise BadInput(f"{one!r} in the address of the store is no host:port.")
            found.append((host.strip("[]"), int(port or default)))
        return found

    def connect(self) -> tuple[Any, tuple[type[Exception], ...]]:
        """Return a client of the redis library, and the errors that it may raise."""
        try:
            import redis
            from redis.backoff import NoBackoff
            from redis.cluster import ClusterNode, RedisCluster
            from redis.retry import Retry
            from redis.sentinel import Sentinel
        except ImportError as error:
            raise MissingExtra(
                "sessions in Redis need the redis library, which is not installed: pip install 'hiddenstate[redis]'."
            ) from error
        # No automatic retries: the next claim shows whether a commit whose answer was lost took place.
        # Version 2 of the protocol, since every server speaks it.
        options: dict[str, Any] = {"socket_timeout": 5.0, "socket_connect_timeout": 2.0, "protocol": 2}
        errors = (redis.RedisError, OSError)
        never = Retry(NoBackoff(), 0)
        if not self.kind:
            return redis.Redis.from_url(self.url, retry=never, **options), errors
        parts = urlsplit(self.url)
        login = {"username": parts.username and unquote(parts.username)}
        login["password"] = parts.password and unquote(parts.password)
        options |= {"ssl": parts.scheme == "rediss", **login, **dict(parse_qsl(parts.query))}
        if self.kind == "cluster":
            nodes = [ClusterNode(host, port) for host, port in self.hosts]  # type: ignore[no-untyped-call]
            try:
                return RedisCluster(startup_nodes=nodes, retry=never, **options), errors
            except errors as error:
                raise StoreFailed(f"the store {self.shown} could not be reached: {error}") from error
        service, _, number = parts.path.strip("/").partition("/")
        keyed = {"password": options.pop("sentinel_password", None)}
        sentinel: Any = Sentinel
        sentinels = sentinel(self.hosts, sentinel_kwargs={**options, **keyed, "username": None})
        return sentinels.master_for(service, db=int(number or 0), retry=never, **options), errors

    def evicts(self, db: Any) -> bool:
        """Return whether a Redis evicts keys that have a time to live; raise where it evicts any."""
        from redis import RedisError

        try:
            found = db.info("memory", target_nodes="primaries") if self.kind == "cluster" else db.info("memory")
        except RedisError:  # it may not let us look
            return False
        nodes = list(found.values()) if "maxmemory" not in found else [found]
        policies = {str(node.get("maxmemory_policy", "")) for node in nodes if node.get("maxmemory")}
        if any(policy.startswith("allkeys") for policy in policies):
            raise StoreFailed(
                f"the Redis at {self.shown} removes any keys when its memory is full (maxmemory-policy "
                f"{', '.join(sorted(policies))}), and with them sessions that were acknowledged. Set it to noeviction: "
                f"then it refuses what it has no room for."
            )
        return any(policy.startswith("volatile") for policy in policies)


def _shown(address: str) -> str:
    return address.rpartition("@")[2]
