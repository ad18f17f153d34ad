"""Servers on the loopback, in this process or in one of their own, for as long as a test needs them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import uvicorn

from hiddenstate.serve import Engine, app
from tests.support.deadline import wait_until

ROOT = Path(__file__).parents[2]


def serving(engine: Engine, **options: Any) -> AbstractContextManager[str]:
    """The address of a server for `engine`, in a thread of this process."""
    return serving_app(app(engine, **options), ws_max_size=options.get("body", 1 << 24))


@contextmanager
def serving_app(application: Any, **options: Any) -> Iterator[str]:
    """The address of a server for any application."""
    ending = {"ws_per_message_deflate": False, "timeout_graceful_shutdown": 5}
    server = uvicorn.Server(uvicorn.Config(application, port=0, log_level="error", **ending, **options))
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
from tests.support.models import Deep, second_version

signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for the children: the test kills them
for line in sys.stdin:
    port, store, version = line.split()
    sys.stdout.flush()
    child = os.fork()
    if not child:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        torch.set_num_threads(1)
        torch.manual_seed(0)
        model, options = Deep(), {}
        if version != "0":
            options = {"version": int(version), "migrate": lambda state: state}
        if version == "2":
            model = second_version(model)
        run(model, store=store, port=int(port), log_level="critical", limits={"new_sessions": 1e6}, **options)
        os._exit(0)
    print(child, flush=True)
"""


class Nursery:
    """Starts servers of `Deep()`, seeded with 0, in processes of their own."""

    def __init__(self) -> None:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}"}
        self._process = subprocess.Popen(
            [sys.executable, "-c", _NURSERY], env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def start(self, port: int, store: str, *, version: int = 0) -> int:
        """Start a server and return the number of its process when it is ready."""
        self._process.stdin.write(f"{port} {store} {version}\n")
        self._process.stdin.flush()
        child = int(self._process.stdout.readline())
        wait_until(lambda: _ready(f"http://127.0.0.1:{port}/readyz") or not runs(child), seconds=60)
        if not runs(child):
            raise RuntimeError(f"the server on port {port} ended before it was ready")
        return child

    def close(self) -> None:
        """End it; not by closing its input, since an interpreter with torch in it takes seconds to end by itself."""
        self._process.kill()
        self._process.wait()
        self._process.stdin.close()
        self._process.stdout.close()


def kill(process: int) -> None:
    """As if the power had gone; a process that has ended already is left alone."""
    with suppress(ProcessLookupError):
        os.kill(process, signal.SIGKILL)
    wait_until(lambda: not runs(process))


def runs(process: int) -> bool:
    """Say whether there is still such a process."""
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
