"""Servers on the loopback, in this process or in one of their own, for as long as a test needs them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import uvicorn

from hiddenstate.serve import Engine, app
from tests.support.redis import free_port

ROOT = Path(__file__).parents[2]


@contextmanager
def serving(engine: Engine, **options: Any) -> Iterator[str]:
    """The address of a server for `engine`, in a thread of this process."""
    server = uvicorn.Server(
        uvicorn.Config(
            app(engine, **options),
            port=0,
            log_level="error",
            ws_per_message_deflate=False,
            ws_max_size=options.get("body", 1 << 24),
            timeout_graceful_shutdown=5,
        )
    )
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    wait_until(lambda: server.started)
    try:
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(20)


class Process:
    """A server in a process of its own, which can be killed, paused and started again on the same port."""

    def __init__(self, script: str, *arguments: str) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self._command = [sys.executable, "-c", script, str(self.port), *arguments]
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        self._process = subprocess.Popen(self._command, env=environment, stderr=subprocess.PIPE)
        wait_until(self._ready, seconds=60)

    def _ready(self) -> bool:
        assert self._process is not None
        if self._process.poll() is not None:
            raise RuntimeError(f"the server ended: {self._process.stderr.read().decode()[-2000:]}")
        try:
            return httpx.get(f"{self.url}/readyz", timeout=1, trust_env=False).status_code == 200
        except httpx.TransportError:
            return False

    def signal(self, number: int) -> None:
        self._process.send_signal(number)

    def kill(self) -> None:
        """As if the power had gone."""
        if self._process is not None:
            self._process.send_signal(signal.SIGKILL)
            self._process.wait()
            self._process.stderr.close()
            self._process = None

    def stop(self) -> int:
        """Ask it to end, and return how it did."""
        self._process.terminate()
        code = self._process.wait(30)
        self._process.stderr.close()
        self._process = None
        return code


def wait_until(done: Any, *, seconds: float = 15) -> None:
    end = time.monotonic() + seconds
    while not done():
        if time.monotonic() > end:
            raise TimeoutError(f"it did not happen within {seconds} s")
        time.sleep(0.01)
