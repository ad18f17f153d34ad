"""The address of a store: `memory:`, `sqlite:///path`, `redis://host:port/number`, a Sentinel's or a Cluster's."""

from __future__ import annotations

from urllib.parse import unquote, urlsplit

from ...errors import BadInput
from .memory import MemoryStore
from .store import Store


def open_store(address: str | Store) -> Store:
    """Open the store at `address`; a store that is given is returned as it is.

    >>> open_store("memory:").count()
    0
    """
    if isinstance(address, Store):
        return address
    kind, _, rest = str(address).partition(":")
    if kind == "memory" and not rest.strip("/"):
        return MemoryStore()
    if kind == "sqlite" and rest.startswith("///") and len(rest) > 3:
        from .sqlite import SqliteStore

        return SqliteStore(unquote(rest.removeprefix("///")))
    if (
        kind.partition("+")[0] in ("redis", "rediss", "unix")
        and urlsplit(str(address)).netloc + urlsplit(str(address)).path
    ):
        from .redis import RedisStore

        return RedisStore(str(address))
    raise BadInput(
        f"the store is {address!r}, but 'memory:', 'sqlite:///path' (four slashes for an absolute path) or "
        f"'redis://host:port/number' is needed (or redis+sentinel://hosts/service, redis+cluster://hosts)."
    )
