"""The command `serve`: every option reaches what it is about."""

import inspect
import json
import os
import re
import signal
import socket
import subprocess
import sys

import httpx
import pytest

from hiddenstate.serve import Engine
from hiddenstate.serve.server import run as run_server
from hiddenstate.serve.web import Limits
from tests.support.deadline import wait_until
from tests.support.redis import free_port
from tests.support.web import ROOT

MODEL = """
import torch

def gru():
    torch.manual_seed(0)
    return torch.nn.GRU(3, 8, batch_first=True)

def grown(state):
    return state
"""


@pytest.fixture
def asked(tmp_path, monkeypatch, capsys):
    """What the command hands to `run`, given its options."""
    from hiddenstate.cli import main

    (tmp_path / "served.py").write_text(MODEL)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("HIDDENSTATE_TOKENS", raising=False)

    def call(*options: str) -> dict:
        found = {}
        with monkeypatch.context() as patched:
            patched.setattr("hiddenstate.serve.run", lambda model, **given: found.update(given))
            with pytest.raises(SystemExit) as ended:
                main(["serve", "served.py:gru", *options])
        assert ended.value.code == 0, capsys.readouterr().err
        return found

    return call


def test_what_is_not_asked_for_is_as_in_python(asked):
    given = asked()
    defaults = {
        name: parameter.default
        for of in (Engine.__init__, run_server)
        for name, parameter in inspect.signature(of).parameters.items()
    }
    limits = given.pop("limits")
    assert {name: value for name, value in given.items() if value != defaults[name]} == {}
    general = Limits()
    assert {name: value for name, value in limits.items() if value != getattr(general, name)} == {}


def test_every_limit_has_an_option(asked):
    given = asked(
        *["--max-body", "7", "--max-json", "6", "--max-steps", "5", "--new-sessions", "4", "--max-inputs", "3"],
        *["--max-streams", "2", "--window", "1", "--max-batch", "9", "--max-sessions", "10", "--max-stored", "11"],
        *["--max-pending", "12", "--max-wait-ms", "13", "--ttl", "14", "--replay", "15", "--drain", "16"],
    )
    most = {"body": 7, "json": 6, "steps": 5, "new_sessions": 4, "inputs": 3, "streams": 2, "window": 1}
    assert given["limits"] == most
    assert set(given["limits"]) == set(Limits.__dataclass_fields__)
    names = ("max_batch", "max_sessions", "max_stored", "max_pending", "max_wait_ms", "ttl", "replay", "drain")
    assert [given[name] for name in names] == [9, 10, 11, 12, 13, 14, 15, 16]


def test_tokens_names_and_versions_are_handed_over(asked):
    given = asked("--tokens", "file", "--allow-host", "a", "--allow-host", "b", "--allow-origin", "https://c")
    assert (given["token_file"], given["hosts"], given["origins"]) == ("file", ["a", "b"], ["https://c"])
    assert asked("--token", "a", "--token", "b")["tokens"] == ["a", "b"]
    assert asked("--model-version", "2", "--migrate", "drain")["migrate"] == "drain"
    assert asked("--migrate", "served.py:grown")["migrate"].__name__ == "grown"


@pytest.fixture
def command(tmp_path):
    """The command as a process of its own."""
    (tmp_path / "served.py").write_text(MODEL)
    environment = {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}", "OMP_NUM_THREADS": "1"}
    environment.pop("HIDDENSTATE_TOKENS", None)
    started = []

    def start(*options: str, **more: str) -> subprocess.Popen:
        line = [sys.executable, "-m", "hiddenstate", "serve", "served.py:gru", *options]
        env, pipe = {**environment, **more}, subprocess.PIPE
        process = subprocess.Popen(line, cwd=tmp_path, env=env, stdout=pipe, stderr=pipe, text=True)
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


def test_a_check_says_that_all_is_well_or_what_is_not(command, tmp_path):
    well = command("--check")
    out, err = well.communicate(timeout=60)
    assert (well.returncode, err) == (0, "")
    assert out.startswith("all is well: served.py:gru can be served on 127.0.0.1:8080")
    assert not (tmp_path / "sessions.db").exists()
    open_to_all = command("--check", "--host", "0.0.0.0")
    _, err = open_to_all.communicate(timeout=60)
    assert open_to_all.returncode == 2
    assert "--insecure" in err


@pytest.mark.slow
def test_told_to_stop_with_connections_half_open_it_ends_and_says_so_in_json(command):
    """The process is told to stop while a thousand requests have been begun and not ended."""
    port, other = free_port(), free_port()
    options = ["--port", str(port), "--store", "memory:", "--log-format", "json", "--metrics-port", str(other)]
    process = command(*options, HIDDENSTATE_TOKENS="alice: secret")
    url = f"http://127.0.0.1:{port}"
    wait_until(lambda: _answers(f"{url}/readyz"), seconds=60)
    assert httpx.get(f"{url}/metrics", trust_env=False).status_code == 401
    assert httpx.get(f"http://127.0.0.1:{other}/metrics", trust_env=False).status_code == 200
    head = (
        "POST /v1/sessions/a/steps HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer secret\r\nContent-Length: 100\r\n\r\n{"
    )
    begun = [b"", b"POST /v1/sess", head.encode()]
    connections = [socket.create_connection(("127.0.0.1", port)) for _ in range(1000)]
    try:
        for number, connection in enumerate(connections):
            connection.sendall(begun[number % 3])
        assert _answers(f"{url}/healthz")
        process.send_signal(signal.SIGTERM)
        _, err = process.communicate(timeout=10)
    finally:
        for connection in connections:
            connection.close()
    lines = [json.loads(line) for line in err.splitlines()]
    assert {"time", "level", "logger", "message"} <= set(lines[0])
    assert not any("/v1/sessions" in line["message"] for line in lines)  # no access log unless asked for


def _answers(url: str) -> bool:
    try:
        return httpx.get(url, trust_env=False, timeout=5).status_code == 200
    except httpx.TransportError:
        return False


def test_the_page_for_operations_has_every_option_with_its_default():
    from typer.main import get_command

    from hiddenstate.cli.app import app

    text = (ROOT / "docs" / "serve" / "operations.md").read_text()
    told = dict(re.findall(r"^\| `(--[a-z-]+)` \| ([^|]*?) ?\|", text, re.M))
    options = {one.opts[0]: one.default for one in get_command(app).commands["serve"].params if one.opts[0] != "model"}
    assert set(told) == set(options)
    for name, default in options.items():
        said = told[name].strip("`")
        assert said == ("off" if default is False else str(default)) or (
            default is None and "`" not in told[name][:1]
        ), name
