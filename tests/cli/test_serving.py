"""`hiddenstate serve` as a program: it answers, and ends cleanly when it is told to."""

import signal
import socket
import subprocess
import sys
import time
import urllib.request

import pytest


@pytest.mark.slow
def test_it_serves_until_it_is_told_to_stop(here):
    pytest.importorskip("uvicorn")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "hiddenstate", "serve", "my_models:gru", "--store", "memory:", "--port", str(port)]
    server = subprocess.Popen(command, cwd=here, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        assert answer(f"http://127.0.0.1:{port}/healthz", server) == 200
        server.send_signal(signal.SIGINT)
        said, _ = server.communicate(timeout=30)
    finally:
        server.kill()
    assert server.returncode in (0, 130), said
    assert "Traceback" not in said


def answer(url: str, server: subprocess.Popen) -> int:
    for _ in range(300):
        assert server.poll() is None, server.stdout.read()
        try:
            with urllib.request.urlopen(url, timeout=5) as response:
                return response.status
        except OSError:
            time.sleep(0.1)
    raise AssertionError("the server does not answer")
