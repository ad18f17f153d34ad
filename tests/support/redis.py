"""A Redis of our own on a free port of the loopback, for as long as a test needs it."""

from __future__ import annotations

import shutil
import socket
import subprocess
import time
from pathlib import Path

import pytest

SERVER = shutil.which("redis-server")


class RedisServer:
    """A redis-server that writes every change to disk before it answers, and can be stopped and started again."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.port = free_port()
        self._process: subprocess.Popen[bytes] | None = None
        self.start()

    def address(self, prefix: str = "hiddenstate", **options: object) -> str:
        query = "&".join(f"{key}={value}" for key, value in {"prefix": prefix, **options}.items())
        return f"redis://127.0.0.1:{self.port}/0?{query}"

    def start(self) -> None:
        settings = ["--port", self.port, "--bind", "127.0.0.1", "--dir", self._folder, "--save", ""]
        settings += ["--appendonly", "yes", "--appendfsync", "always", "--daemonize", "no", "--loglevel", "warning"]
        with open(self._folder / "redis.log", "ab") as log:
            self._process = subprocess.Popen([SERVER, *map(str, settings)], stdout=log, stderr=log)
        for _ in range(200):
            try:
                with socket.create_connection(("127.0.0.1", self.port), timeout=1) as connection:
                    connection.sendall(b"PING\r\n")
                    if connection.recv(16).startswith(b"+PONG"):
                        return
            except OSError:
                pass
            time.sleep(0.02)
        raise RuntimeError(f"redis-server did not start: {(self._folder / 'redis.log').read_text()[-500:]}")

    def stop(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


needed = pytest.mark.skipif(SERVER is None, reason="there is no redis-server on this machine")
