"""Engines and servers under random callers and faults, for as long as one likes: is all that callers saw explained?

python benchmarks/chaos_serve.py --minutes 240
python benchmarks/chaos_serve.py --seed 277 --only servers-redis

Callers push, repeat, open, fork, reset, close, export and import, and give up; inputs are NaN; stores fail and are
locked, are set back to older copies and fill their disk, workers are killed, paused, stopped and started, Redis is
killed, clocks jump, models stall. What was answered must be what sessions give that are run one operation at a time by
torch alone (tests/support/history.py). The first history that cannot be explained is printed with its seed; the exit
status says whether there was one.
"""

import argparse
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
from tests.support.chaos import EngineFleet, Report, ServerFleet, closing, drive
from tests.support.disk import small_disk
from tests.support.redis import SERVER, RedisServer


def _memory(folder: Path) -> EngineFleet:
    return EngineFleet("memory:")


def _sqlite(folder: Path) -> EngineFleet:
    return EngineFleet(f"sqlite:///{folder}/sessions.db", engines=2)


def _servers(folder: Path) -> ServerFleet:
    return ServerFleet(f"sqlite:///{folder}/sessions.db", workers=1)


_PLAIN: dict[str, Callable[[Path], EngineFleet | ServerFleet]] = {
    "engine-memory": _memory,
    "engines-sqlite": _sqlite,
    "servers-sqlite": _servers,
}
_WITH_REDIS: dict[str, Callable[[RedisServer], EngineFleet | ServerFleet]] = {
    "engines-redis": lambda redis: EngineFleet(redis.address(lease=0.1), engines=2),
    "servers-redis": lambda redis: ServerFleet(redis.address(lease=0.2), workers=2, redis=redis),
}


_ON_A_DISK = "engine-disk"  # of its own, which is filled, where one can be mounted


def driven(kind: str, *, seed: int, seconds: float) -> Report:
    """One run of one kind."""
    with tempfile.TemporaryDirectory() as folder:
        if kind == _ON_A_DISK:
            with small_disk(Path(folder) / "disk") as disk:
                address = f"sqlite:///{disk or folder}/sessions.db"
                with closing(EngineFleet(address, disk=disk)) as fleet:
                    return drive(fleet, seed=seed, seconds=seconds)
        if kind in _PLAIN:
            with closing(_PLAIN[kind](Path(folder))) as fleet:
                return drive(fleet, seed=seed, seconds=seconds)
        redis = RedisServer(Path(folder))
        try:
            with closing(_WITH_REDIS[kind](redis)) as fleet:
                return drive(fleet, seed=seed, seconds=seconds)
        finally:
            redis.stop()


def main() -> int:
    """Go round all kinds until the time is over."""
    kinds = [*_PLAIN, _ON_A_DISK, *(_WITH_REDIS if SERVER else ())]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", choices=kinds)
    options = parser.parse_args()
    if not SERVER:
        print("there is no redis-server on this machine: what runs on Redis is left out")
    seed, end = options.seed, time.monotonic() + 60 * options.minutes
    while time.monotonic() < end or seed == options.seed:
        for kind in [options.only] if options.only else kinds:
            try:
                print(f"{kind}, seed {seed}: {driven(kind, seed=seed, seconds=10.0)}", flush=True)
            except (AssertionError, RuntimeError) as error:
                print(f"{kind}, seed {seed}: {error}")
                return 1
        seed += 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
