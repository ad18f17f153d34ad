"""What goes wrong in production: processes killed and paused, stores full, locked and gone, clients that vanish."""

import asyncio
import os
import random
import signal
import socket
import sqlite3
import threading
import uuid
from contextlib import ExitStack

import httpx
import pytest
import torch
from torch import Tensor

from hiddenstate.cells import listeners
from hiddenstate.errors import Overloaded, StoreFailed
from hiddenstate.serve import Client, Engine
from hiddenstate.serve.stores.sqlite import SqliteStore
from tests.support.deadline import wait_until
from tests.support.models import Deep
from tests.support.redis import RedisServer, free_port
from tests.support.web import Nursery, kill, serving

pytestmark = pytest.mark.long

CLOSE = {"rtol": 1e-5, "atol": 1e-6}
KILLS = 20
CALLERS = 6


def whole(x: Tensor) -> Tensor:
    """The uninterrupted run: x (steps, feature)."""
    torch.manual_seed(0)
    with torch.no_grad():
        return Deep()(x.unsqueeze(0))[0]


@pytest.fixture(scope="module")
def nursery():
    made = Nursery()
    yield made
    made.close()


class Caller(threading.Thread):
    """Pushes one input after another to a session of its own, until it is told to stop."""

    def __init__(self, urls: list[str], name: str, *, streams: bool) -> None:
        super().__init__(daemon=True)
        self.session, self._urls, self._streams = name, urls, streams
        self.inputs: list[Tensor] = []
        self.outputs: list[Tensor] = []
        self.enough = threading.Event()
        self.error: BaseException | None = None

    def _next(self):
        while not self.enough.is_set():
            self.inputs.append(torch.randn(random.randint(1, 3), 3))
            yield self.inputs[-1]

    def run(self) -> None:
        with ExitStack() as stack:
            clients = [stack.enter_context(Client(url, patience=60, timeout=20)) for url in self._urls]
            self._call(clients)

    def _call(self, clients: list[Client]) -> None:
        try:
            clients[0].open(self.session)
            if self._streams:
                self.outputs.extend(clients[0].stream(self.session, self._next()))
                return
            for seq, x in enumerate(self._next(), 1):
                # Any worker will do: which one is asked changes with every input.
                self.outputs.append(clients[seq % len(clients)].push(self.session, x, seq))
        except BaseException as error:
            self.error = error

    def check(self, info) -> None:
        """Nothing acknowledged is lost, nothing is applied twice, and all equals an uninterrupted run."""
        if self.error is not None:
            raise self.error
        assert len(self.outputs) == len(self.inputs) > 0
        assert (info.seq, info.steps) == (len(self.inputs), sum(map(len, self.inputs)))
        torch.testing.assert_close(torch.cat(self.outputs), whole(torch.cat(self.inputs)), **CLOSE)


def under_load(urls: list[str], disturb) -> int:
    """Let callers push while `disturb` does its worst, and return how many inputs were applied.

    `disturb` is handed a function that waits until so many more inputs have been answered.
    """
    callers = [Caller(urls, uuid.uuid4().hex, streams=place % 2 == 1) for place in range(CALLERS)]
    for caller in callers:
        caller.start()
    wait_until(lambda: all(caller.outputs or caller.error for caller in callers), seconds=60)

    def answered() -> int:
        return sum(len(caller.outputs) for caller in callers)

    def go_on(inputs: int) -> None:
        wanted = answered() + inputs
        wait_until(lambda: answered() >= wanted or any(caller.error for caller in callers), seconds=60)

    disturb(go_on)
    for caller in callers:
        caller.enough.set()
    for caller in callers:
        caller.join(60)
    with Client(urls[0]) as client:
        for caller in callers:
            caller.check(client.info(caller.session))
    return sum(len(caller.inputs) for caller in callers)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["sqlite", pytest.param("redis", marks=pytest.mark.redis)])
def test_killed_twenty_times_under_load_it_loses_and_doubles_nothing(kind, nursery, tmp_path, request):
    store = f"sqlite:///{tmp_path}/sessions.db"
    if kind == "redis":
        store = request.getfixturevalue("redis_server").address(uuid.uuid4().hex, lease=0.2)
    port = free_port()
    alive = [nursery.start(port, store)]

    def disturb(go_on) -> None:
        for _ in range(KILLS):
            go_on(random.randint(1, 4 * CALLERS))
            kill(alive.pop())
            alive.append(nursery.start(port, store))
        go_on(CALLERS)

    try:
        assert under_load([f"http://127.0.0.1:{port}"], disturb) > KILLS
    finally:
        kill(alive.pop())


@pytest.mark.slow
@pytest.mark.redis
def test_of_two_workers_on_one_redis_one_is_paused_and_killed(nursery, redis_server):
    store = redis_server.address(uuid.uuid4().hex, lease=0.2)
    ports = [free_port(), free_port()]
    workers = [nursery.start(port, store) for port in ports]

    urls = [f"http://127.0.0.1:{port}" for port in ports]

    def disturb(go_on) -> None:
        with Client(urls[0]) as first, Client(urls[1]) as second:
            first.open("shared")
            for turn in range(4):
                paused, awake = (first, second) if turn % 2 == 0 else (second, first)
                paused.push("shared", torch.randn(1, 3))
                os.kill(workers[turn % 2], signal.SIGSTOP)
                # Answered only past the lease of the one that is paused: the other one goes on with its sessions.
                awake.push("shared", torch.randn(1, 3))
                os.kill(workers[turn % 2], signal.SIGCONT)
                go_on(CALLERS)
        kill(workers[1])
        workers[1] = nursery.start(ports[1], store)

    try:
        under_load(urls, disturb)
    finally:
        for worker in workers:
            kill(worker)


class Gated(Deep):
    """A model that can be held up in the midst of a call."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = threading.Event()
        self.gate.set()
        self.entered = threading.Event()

    def forward(self, x: Tensor) -> Tensor:
        self.entered.set()
        self.gate.wait(20)
        return super().forward(x)


@pytest.mark.redis
def test_a_worker_paused_past_its_lease_is_fenced(redis_server):
    store, x = redis_server.address(uuid.uuid4().hex, lease=0.05), torch.randn(4, 3)
    torch.manual_seed(0)
    slow, other = Gated(), Gated()
    other.load_state_dict(slow.state_dict())
    with torch.no_grad():
        wanted = other(x.unsqueeze(0))[0]
    with Engine(slow, store) as paused, Engine(other, store) as awake:
        paused.open("a")
        torch.testing.assert_close(paused.push("a", x[:1], 1), wanted[:1], **CLOSE)
        slow.gate.clear()
        slow.entered.clear()
        late: list[Tensor] = []
        thread = threading.Thread(target=lambda: late.append(paused.push("a", torch.randn(1, 3), 2)))
        thread.start()
        slow.entered.wait(10)
        torch.testing.assert_close(awake.push("a", x[1:2], 2), wanted[1:2], **CLOSE)
        torch.testing.assert_close(awake.push("a", x[2:3], 3), wanted[2:3], **CLOSE)
        slow.gate.set()
        thread.join(20)
        # What it had computed for its own second input never was; it is answered what the other one answered.
        torch.testing.assert_close(late[0], wanted[1:2], **CLOSE)
        assert paused.info("a").seq == 3
        torch.testing.assert_close(paused.push("a", x[3:], 4), wanted[3:], **CLOSE)
        torch.testing.assert_close(awake.push("a", x[3:], 4), wanted[3:], **CLOSE)


@pytest.mark.redis
def test_a_session_that_another_worker_never_lets_go_is_refused_in_the_end(redis_server, monkeypatch):
    from hiddenstate.serve import tick

    monkeypatch.setattr(tick, "_PATIENCE", 0.2)
    store = redis_server.address(uuid.uuid4().hex, lease=30)
    torch.manual_seed(0)
    slow, other = Gated(), Gated()
    other.load_state_dict(slow.state_dict())
    with Engine(slow, store) as busy, Engine(other, store) as waiting:
        busy.open("a")
        slow.gate.clear()
        slow.entered.clear()
        thread = threading.Thread(target=lambda: busy.push("a", torch.zeros(3)))
        thread.start()
        slow.entered.wait(10)
        with pytest.raises(Overloaded, match="session 'a' is being changed by another worker all the time"):
            waiting.push("a", torch.zeros(3))
        slow.gate.set()
        thread.join(20)
        waiting.push("a", torch.zeros(3), 2)


# Stores.


def test_a_full_disk_fails_inputs_and_loses_nothing(tmp_path):
    store = SqliteStore(str(tmp_path / "sessions.db"))
    torch.manual_seed(0)
    model, x = Deep(), torch.randn(40, 3)
    got: list[Tensor] = []
    with Engine(model, store) as engine:
        engine.open("a")
        got.append(engine.push("a", x[:1], 1))
        pages = store._db.execute("PRAGMA page_count").fetchone()[0]
        store._db.execute(f"PRAGMA max_page_count = {pages}")
        refused = 0
        for place in range(100):
            try:
                engine.open(f"another-{place}" + "x" * 400)
            except StoreFailed as error:
                refused += 1
                message = str(error)
        assert refused
        assert "could not write: database or disk is full" in message
        assert "Nothing was acknowledged" in message
        failures = 0
        for seq in range(2, 20):
            try:
                got.append(engine.push("a", x[seq - 1 : seq], seq))
            except StoreFailed:
                failures += 1
                store._db.execute("PRAGMA max_page_count = 1000000")  # somebody made room
                got.append(engine.push("a", x[seq - 1 : seq], seq))
        assert engine.info("a").seq == 19
    torch.testing.assert_close(torch.cat(got), whole(x)[:19], **CLOSE)


def test_a_locked_database_fails_inputs_and_they_may_be_repeated(tmp_path):
    path = tmp_path / "sessions.db"
    x = torch.randn(2, 3)
    torch.manual_seed(0)
    with Engine(Deep(), SqliteStore(str(path), patience=0.05)) as engine:
        engine.open("a")
        first = engine.push("a", x[:1], 1)
        other = sqlite3.connect(path, isolation_level=None)
        other.execute("BEGIN IMMEDIATE")
        for _ in range(2):
            with pytest.raises(StoreFailed, match="could not write: database is locked"):
                engine.push("a", x[1:], 2)
        assert engine.info("a").seq == 1
        other.execute("ROLLBACK")
        other.close()
        second = engine.push("a", x[1:], 2)
    torch.testing.assert_close(torch.cat([first, second]), whole(x), **CLOSE)


def test_two_engines_on_one_file_do_not_overwrite_each_other(tmp_path):
    address, x = f"sqlite:///{tmp_path}/sessions.db", torch.randn(6, 3)
    torch.manual_seed(0)
    model, twin = Deep(), Deep()
    twin.load_state_dict(model.state_dict())
    with Engine(model, address) as one, Engine(twin, address) as two:
        one.open("a")
        got = [(one, two)[step % 2].push("a", x[step], step + 1) for step in range(6)]
    torch.testing.assert_close(torch.stack(got), whole(x), **CLOSE)


def test_inputs_that_wait_together_are_each_applied_once_where_another_engine_comes_between(tmp_path):
    """Cut to the first of them, since the session must be looked up, and this one too late: all of them come again."""
    address, x = f"sqlite:///{tmp_path}/sessions.db", torch.randn(5, 3)
    torch.manual_seed(0)
    model, twin = Deep(), Deep()
    twin.load_state_dict(model.state_dict())
    between = [x[0]]
    with Engine(model, address) as one, Engine(twin, address) as two:
        two.open("a")

        def push_between(module, given) -> None:
            if between:
                two.push("a", between.pop())

        model.register_forward_pre_hook(push_between)

        async def at_once() -> list[Tensor]:
            frames = [(memoryview(step.numpy().tobytes()), None) for step in x[1:]]
            pushes = one.submit_raw("a", frames)
            return [one.output(await push.outcome()) for push in pushes]

        got = asyncio.run(asyncio.wait_for(at_once(), 20))
        assert one.info("a").seq == 5
    torch.testing.assert_close(torch.cat(got), whole(x)[1:], **CLOSE)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda folder: folder / "missing" / "sessions.db", "cannot be opened as a store of sessions"),
        (lambda folder: folder, "cannot be opened as a store of sessions"),
        (lambda folder: _written(folder / "text", b"not a database" * 100), "file is not a database"),
        (lambda folder: _of_the_future(folder / "new.db"), "has version 99 of the format"),
    ],
)
def test_a_file_that_is_no_store_is_refused_and_the_model_comes_back(make, message, tmp_path):
    model = Deep()
    with pytest.raises(StoreFailed, match=message):
        Engine(model, f"sqlite:///{make(tmp_path)}")
    assert not any(listeners(module) for module in model.modules())


def _written(path, content):
    path.write_bytes(content)
    return path


def _of_the_future(path):
    db = sqlite3.connect(path)
    db.execute("PRAGMA user_version = 99")
    db.close()
    return path


@pytest.mark.redis
def test_redis_gone_and_back(tmp_path):
    from tests.support import redis

    if redis.SERVER is None:
        pytest.skip("there is no redis-server on this machine")
    server, x = RedisServer(tmp_path), torch.randn(3, 3)
    torch.manual_seed(0)
    try:
        with Engine(Deep(), server.address()) as engine:
            engine.open("a")
            got = [engine.push("a", x[:1], 1)]
            server.stop()
            for _ in range(2):
                with pytest.raises(StoreFailed, match=r"127.0.0.1:\d+/0 could not read: ConnectionError"):
                    engine.push("a", x[1:2], 2)
            server.start()
            got += [engine.push("a", x[1:2], 2), engine.push("a", x[2:], 3)]
    finally:
        server.stop()
    torch.testing.assert_close(torch.cat(got), whole(x), **CLOSE)


def test_a_redis_that_is_not_there_is_said_so():
    with pytest.raises(StoreFailed, match="could not be reached"):
        Engine(Deep(), f"redis://127.0.0.1:{free_port()}/0")


# Clients.


def test_clients_that_vanish_in_mid_frame_disturb_nobody():
    with Engine(Deep()) as engine, serving(engine) as url:
        host, port = url.removeprefix("http://").split(":")
        engine.open("a")
        upgrade = (
            f"GET /v1/sessions/a/stream HTTP/1.1\r\nHost: {host}\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
            "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 13\r\n\r\n"
        ).encode()
        frame = b"\x82\x94" + b"\0\0\0\0" + (0).to_bytes(8, "little") + b"\0" * 12  # one step, masked with zeros
        beginnings = [
            b"POST /v1/sessions/a/steps HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n\r\n{",
            upgrade + frame[:9],
            upgrade + frame + frame[:3],
            upgrade + frame * 50,
            upgrade[:40],
        ]
        for beginning in beginnings * 4:
            with socket.create_connection((host, int(port)), timeout=5) as connection:
                connection.sendall(beginning)
                connection.recv(1) if beginning.startswith(upgrade) else None
        with Client(url) as client:
            before = client.info("a").seq
            client.push("a", torch.randn(3))
            wait_until(lambda: engine.pending == 0)
            assert client.info("a").seq > before
        assert httpx.get(f"{url}/healthz", trust_env=False).status_code == 200
