"""The client: it numbers, repeats, reconnects, and raises what the engine would raise."""

import copy
import socket
import threading
from contextlib import suppress

import pytest
import torch

from hiddenstate.errors import BadInput, SequenceGap, ServeError, SessionExists, SessionLost
from hiddenstate.serve import Client, Engine
from hiddenstate.serve.client import as_error
from tests.support.models import Deep, TimeFirst
from tests.support.redis import free_port
from tests.support.web import serving

CLOSE = {"rtol": 1e-5, "atol": 1e-6}


@pytest.fixture
def oracle():
    torch.manual_seed(0)
    return Deep().eval()


@pytest.fixture
def engine(oracle):
    with Engine(copy.deepcopy(oracle)) as made:
        yield made


@pytest.fixture
def client(engine):
    with serving(engine) as url, Client(url, patience=5) as made:
        yield made


def test_it_does_what_the_engine_does(client, oracle):
    x = torch.randn(9, 3)
    wanted = oracle(x.unsqueeze(0))[0].detach()
    a = client.open("a")
    got = [client.push(a, x[:3]), client.push(a, x[3]).unsqueeze(0)]
    data = client.export(a)
    b = client.fork(a, "b")
    got += list(client.stream(a, x[4:7].split(1)))
    got += [client.push(a, x[7:])]
    torch.testing.assert_close(torch.cat(got), wanted, **CLOSE)
    assert (client.info(a).seq, client.info(b).seq) == (6, 2)
    client.import_("c", data)
    for name in "bc":
        torch.testing.assert_close(client.push(name, x[4:]), wanted[4:], **CLOSE)
    client.reset("b")
    torch.testing.assert_close(client.push("b", x), wanted, **CLOSE)
    client.close("b")
    assert client.sessions() == sorted([a, "c"])
    assert client.sessions("c") == ["c"]


def test_errors_are_the_engines_own(client):
    client.open("a")
    with pytest.raises(SessionExists, match="a session 'a' already"):
        client.open("a")
    assert client.open("a", exist_ok=True) == "a"
    with pytest.raises(SessionLost, match="no session 'nobody'") as caught:
        client.push("nobody", torch.zeros(3))
    assert caught.value.reason == "unknown"
    with pytest.raises(SequenceGap, match="1 comes next") as gap:
        client.push("a", torch.zeros(3), 4)
    assert gap.value.seq == 0
    with pytest.raises(BadInput, match=r"one step of this model has \(3,\)"):
        client.push("a", torch.zeros(4))
    with pytest.raises(SessionLost, match="no session 'nobody'"):
        list(client.stream("nobody", [torch.zeros(1, 3)]))
    with pytest.raises(BadInput, match="a name without slashes"):
        client.open("a/b")
    with pytest.raises(BadInput, match="begins with http"):
        Client("localhost:8080")


def test_several_outputs_come_by_name():
    with Engine(TimeFirst()) as engine, serving(engine) as url, Client(url) as client:
        client.open("a")
        assert sorted(client.push("a", torch.zeros(2, 3))) == ["0", "1"]
        (streamed,) = client.stream("a", [torch.zeros(2, 3)])
        assert streamed["1"].shape == (2, 4)


def test_a_server_that_is_not_there_is_an_error_when_patience_ends():
    with Client(f"http://127.0.0.1:{free_port()}", patience=0.2) as client:
        with pytest.raises(ServeError, match=r"does not answer: ConnectError"):
            client.info("a")
        with pytest.raises(ServeError, match=r"does not answer: "):
            list(client.stream("a", [torch.zeros(3)]))


class Rough:
    """A proxy that breaks every connection after some bytes of the server's answers."""

    def __init__(self, port: int, after: int) -> None:
        self._target, self._after = port, after
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self.broken = 0
        self._thread = threading.Thread(target=self._accept, daemon=True)
        self._thread.start()

    def _accept(self) -> None:
        while True:
            try:
                outer, _ = self._listener.accept()
            except OSError:
                return
            inner = socket.create_connection(("127.0.0.1", self._target))
            threads = [
                threading.Thread(target=self._pump, args=(outer, inner, None), daemon=True),
                threading.Thread(target=self._pump, args=(inner, outer, self._after), daemon=True),
            ]
            for thread in threads:
                thread.start()

    def _pump(self, source: socket.socket, target: socket.socket, left: int | None) -> None:
        with suppress(OSError):
            while data := source.recv(100):
                if left is not None and len(data) > left:
                    target.sendall(data[:left])
                    self.broken += 1
                    break
                left = None if left is None else left - len(data)
                target.sendall(data)
        for end in (source, target):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()

    def close(self) -> None:
        self._listener.close()


def test_a_connection_that_breaks_again_and_again_loses_and_doubles_nothing(engine, oracle):
    x = torch.randn(40, 3)
    wanted = oracle(x.unsqueeze(0))[0].detach()
    with serving(engine) as url:
        port = int(url.rpartition(":")[2])
        for streams in (True, False):
            rough = Rough(port, after=600)
            name = f"streams {streams}"
            try:
                with Client(rough.url, patience=20) as client:
                    client.open(name)
                    pieces = x.split(1)
                    got = list(client.stream(name, pieces)) if streams else [client.push(name, p) for p in pieces]
            finally:
                rough.close()
            assert rough.broken > 1
            assert engine.info(name).seq == 40
            torch.testing.assert_close(torch.cat(got), wanted, **CLOSE)


@pytest.mark.parametrize(
    ("facts", "kind"),
    [
        ({"kind": "SessionExists", "message": "m"}, SessionExists),
        ({"kind": "BadInput", "message": "m"}, BadInput),
        ({"kind": "HTTP", "message": "m"}, ServeError),
        ({"kind": "annotations", "message": "m"}, ServeError),
        ({}, ServeError),
    ],
)
def test_an_error_is_made_again_from_what_is_told(facts, kind):
    assert type(as_error(facts)) is kind
