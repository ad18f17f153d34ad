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


# Imports once, then forks a server for each line it is told: starting one so takes a tenth of the time.
_NURSERY = """
import os, signal, sys
import torch
import uvicorn.protocols.http.h11_impl, uvicorn.protocols.websockets.websockets_sansio_impl
import hiddenstate.serve.web
from hiddenstate.serve import run
from tests.support.models import Deep

signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for the children: the test kills them
for line in sys.stdin:
    port, store = line.split()
    sys.stdout.flush()
    child = os.fork()
    if not child:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        torch.set_num_threads(1)
        torch.manual_seed(0)
        run(Deep(), store=store, port=int(port), log_level="critical", limits={"new_sessions": 1e6})
        os._exit(0)
    print(child, flush=True)
"""


class Nursery:
    """Starts servers of `Deep()`, seeded with 0, in processes of their own."""

    def __init__(self) -> None:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        self._process = subprocess.Popen(
            [sys.executable, "-c", _NURSERY], env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def start(self, port: int, store: str) -> int:
        """Start a server and return the number of its process when it is ready."""
        self._process.stdin.write(f"{port} {store}\n")
        self._process.stdin.flush()
        child = int(self._process.stdout.readline())
        wait_until(lambda: _ready(f"http://127.0.0.1:{port}/readyz"), seconds=60)
        return child

    def close(self) -> None:
        self._process.stdin.close()
        self._process.wait(10)
        self._process.stdout.close()


def kill(process: int) -> None:
    """As if the power had gone."""
    os.kill(process, signal.SIGKILL)
    wait_until(lambda: not _runs(process))


def _runs(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    return True


def _ready(address: str) -> bool:
    try:
        return httpx.get(address, timeout=1, trust_env=False).status_code == 200
    except httpx.TransportError:
        return False


def wait_until(done: Any, *, seconds: float = 15) -> None:
    end = time.monotonic() + seconds
    while not done():
        if time.monotonic() > end:
            raise TimeoutError(f"it did not happen within {seconds} s")
        time.sleep(0.01)
