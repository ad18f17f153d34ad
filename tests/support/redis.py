"""A Redis of our own on a free port of the loopback, for as long as a test needs it."""

from __future__ import annotations

import random
import shutil
import socket
import subprocess
from pathlib import Path

import pytest

from tests.support.deadline import wait_until

SERVER = shutil.which("redis-server")
_PORTS = random.SystemRandom()  # other test processes draw as well, and tests seed the usual stream


class RedisServer:
    """A redis-server that writes every change to disk before it answers, and can be stopped and started again."""

    def __init__(self, folder: Path, *settings: object) -> None:
        self._folder, self._settings = folder, settings
        self.port = free_port()
        self._process: subprocess.Popen[bytes] | None = None
        self.start()

    def address(self, prefix: str = "hiddenstate", **options: object) -> str:
        query = "&".join(f"{key}={value}" for key, value in {"prefix": prefix, **options}.items())
        return f"redis://127.0.0.1:{self.port}/0?{query}"

    def start(self) -> None:
        settings = ["--port", self.port, "--bind", "127.0.0.1", "--dir", self._folder, "--save", ""]
        settings += ["--appendonly", "yes", "--appendfsync", "always", "--daemonize", "no", "--loglevel", "warning"]
        settings += self._settings
        with open(self._folder / "redis.log", "ab") as log:
            self._process = subprocess.Popen([SERVER, *map(str, settings)], stdout=log, stderr=log)
        try:
            wait_until(self._answers)
        except TimeoutError as error:
            log_end = (self._folder / "redis.log").read_text()[-500:]
            raise RuntimeError(f"redis-server did not start: {log_end}") from error

    def _answers(self) -> bool:
        try:
            with socket.create_connection(("127.0.0.1", self.port), timeout=1) as connection:
                connection.sendall(b"PING\r\n")
                return connection.recv(16).startswith(b"+PONG")
        except OSError:
            return False

    def settings_of(self, name: str) -> object:
        return self._settings[self._settings.index(name) + 1]

    def stop(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None


class RedisCluster:
    """Three servers that share the slots."""

    def __init__(self, folder: Path) -> None:
        self.servers = []
        for name in "abc":
            (folder / name).mkdir()
            # The bus of a cluster needs a port too, which by default is this one plus ten thousand.
            settings = ("--cluster-enabled", "yes", "--cluster-port", free_port(), "--cluster-node-timeout", 2000)
            self.servers.append(RedisServer(folder / name, *settings))
        clients = [redis_client(server.port) for server in self.servers]
        cuts = [0, 5461, 10923, 16384]
        for client, begin, end in zip(clients, cuts, cuts[1:], strict=False):
            client.execute_command("CLUSTER", "ADDSLOTSRANGE", begin, end - 1)
        for server in self.servers[1:]:
            bus = server.settings_of("--cluster-port")
            clients[0].execute_command("CLUSTER", "MEET", "127.0.0.1", server.port, bus)
        wait_until(lambda: all(b"cluster_state:ok" in c.execute_command("CLUSTER", "INFO") for c in clients))
        wait_until(lambda: all(len(c.execute_command("CLUSTER", "SLOTS")) == 3 for c in clients))
        for client in clients:
            client.close()

    def address(self, prefix: str = "hiddenstate", **options: object) -> str:
        query = "&".join(f"{key}={value}" for key, value in {"prefix": prefix, **options}.items())
        return f"redis+cluster://{','.join(f'127.0.0.1:{server.port}' for server in self.servers)}?{query}"

    def stop(self) -> None:
        for server in self.servers:
            server.stop()


class WatchedRedis:
    """A primary with a replica, and three Sentinels that make the replica primary when the primary is gone."""

    def __init__(self, folder: Path) -> None:
        for name in ("primary", "replica", "sentinels"):
            (folder / name).mkdir()
        self.primary = RedisServer(folder / "primary", "--repl-diskless-sync-delay", 0)
        self.replica = RedisServer(folder / "replica", "--replicaof", "127.0.0.1", self.primary.port)
        self._processes, self._ports = [], [free_port() for _ in range(3)]
        for port in self._ports:
            settings = folder / "sentinels" / f"{port}.conf"
            settings.write_text(
                f"port {port}\nbind 127.0.0.1\ndir {folder / 'sentinels'}\n"
                f"sentinel monitor served 127.0.0.1 {self.primary.port} 2\n"
                "sentinel down-after-milliseconds served 500\nsentinel failover-timeout served 2000\n"
            )
            line = [SERVER, str(settings), "--sentinel"]
            self._processes.append(subprocess.Popen(line, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL))
        try:
            wait_until(lambda: all(self._knows_all(port) for port in self._ports), seconds=60)
            wait_until(self._follows)
        except BaseException:
            self.stop()
            raise

    def _follows(self) -> bool:
        with redis_client(self.replica.port) as client:
            return client.info("replication")["master_link_status"] == "up"

    def _knows_all(self, port: int) -> bool:
        from redis import RedisError

        client = redis_client(port)
        try:
            facts = client.sentinel_masters()["served"]
            return (int(facts["num-slaves"]), int(facts["num-other-sentinels"])) == (1, 2)
        except (RedisError, KeyError):
            return False
        finally:
            client.close()

    def address(self, prefix: str = "hiddenstate", **options: object) -> str:
        query = "&".join(f"{key}={value}" for key, value in {"prefix": prefix, **options}.items())
        return f"redis+sentinel://{','.join(f'127.0.0.1:{port}' for port in self._ports)}/served?{query}"

    def stop(self) -> None:
        for process in self._processes:
            process.kill()
            process.wait()
        self.primary.stop()
        self.replica.stop()


def redis_client(port: int):
    import redis

    return redis.Redis(port=port, protocol=2)


def free_port() -> int:
    """Return a port of the loopback for servers of this process's tests, which nobody else is given from now on.

    A socket that is bound and does not listen holds it, also while a server is stopped and started again; a server can
    still bind the port, since both allow that (SO_REUSEADDR). Connections to it are refused until one listens. It lies
    below the ports from which the system takes the ends of connections.
    """
    while True:
        port = _PORTS.randrange(15_000, 32_000)
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            # Not before: with this, two that do not listen could have the same port.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.detach()  # until this process ends
            return port


needed = pytest.mark.skipif(SERVER is None, reason="there is no redis-server on this machine")
