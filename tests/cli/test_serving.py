"""`hiddenstate serve` as a program: it answers, and ends cleanly when it is told to."""

import signal
import socket
import subprocess
import sys
import urllib.request

import pytest

from tests.support.deadline import wait_until


@pytest.mark.slow
def test_it_serves_until_it_is_told_to_stop(here):
    pytest.importorskip("uvicorn")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "hiddenstate", "serve", "my_models:gru", "--store", "memory:", "--port", str(port)]
    server = subprocess.Popen(command, cwd=here, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        wait_until(lambda: answers(f"http://127.0.0.1:{port}/healthz", server), seconds=60)
        server.send_signal(signal.SIGINT)
        said, _ = server.communicate(timeout=30)
    finally:
        server.kill()
    assert server.returncode in (0, 130), said
    assert "Traceback" not in said


def answers(url: str, server: subprocess.Popen) -> bool:
    assert server.poll() is None, server.stdout.read()
    try:
        with urllib.request.urlopen(url, timeout=5) as response:
            return response.status == 200
    except OSError:
        return False
