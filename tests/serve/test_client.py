"""The client: it numbers, repeats, reconnects, and raises what the engine would raise."""

import copy
import socket
import threading
import time
from contextlib import suppress

import pytest
import torch

from hiddenstate.errors import (
    BadInput,
    DeadlineExceeded,
    Overloaded,
    SequenceGap,
    ServeError,
    SessionExists,
    SessionLost,
    StoreFailed,
)
from hiddenstate.serve import Client, Engine
from hiddenstate.serve.client import as_error
from hiddenstate.serve.stores import MemoryStore
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
    with pytest.raises(BadInput, match=r"the session is '\.\.', but a name is needed"):
        client.open("..")
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


def _message(source: socket.socket) -> bytes:
    """One whole request or answer."""
    data = b""
    while b"\r\n\r\n" not in data:
        if not (more := source.recv(65536)):
            return b""
        data += more
    head = data.partition(b"\r\n\r\n")[0]
    sizes = [line.split(b":")[1] for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")]
    size = len(head) + 4 + int(sizes[0] if sizes else 0)
    while len(data) < size:
        data += source.recv(65536)
    return data


class Lossy:
    """A proxy that passes every request on, and loses the answers to the first tries of some."""

    def __init__(self, port: int, *, lose: int) -> None:
        self._target, self._lose, self.seen = port, lose, []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                outer, _ = self._listener.accept()
                threading.Thread(target=self._serve, args=(outer,), daemon=True).start()

    def _serve(self, outer: socket.socket) -> None:
        with suppress(OSError), outer, socket.create_connection(("127.0.0.1", self._target)) as inner:
            while request := _message(outer):
                inner.sendall(request)
                answer = _message(inner)
                line = request.split(b"\r\n")[0].split(b"?")[0]
                self.seen.append(line)
                if line.split()[0] in (b"PUT", b"POST", b"DELETE") and self.seen.count(line) <= self._lose:
                    return
                outer.sendall(answer)

    def close(self) -> None:
        self._listener.close()


@pytest.mark.parametrize("lose", [1, 2])
def test_lost_answers_cost_time_only_and_leave_no_session_behind(engine, lose):
    with serving(engine) as url:
        lossy = Lossy(int(url.rpartition(":")[2]), lose=lose)
        try:
            with Client(lossy.url, patience=20) as client:
                made = client.open()
                assert client.open("a/b") == "a/b"
                client.push("a/b", torch.zeros(3))
                forked, named = client.fork("a/b"), client.fork("a/b", "c")
                assert sorted(engine.sessions()) == sorted([made, "a/b", forked, named])
                assert {engine.info(name).seq for name in (forked, named)} == {1}
                for name in (made, "a/b", forked, named):
                    client.close(name)
        finally:
            lossy.close()
    assert len(lossy.seen) >= 2 * 8


def test_a_session_of_somebody_else_is_not_taken_for_ones_own(engine):
    with serving(engine) as url:
        engine.open("a")
        engine.push("a", torch.zeros(3))
        engine.open("source")
        lossy = Lossy(int(url.rpartition(":")[2]), lose=1)
        try:
            with Client(lossy.url, patience=20) as client:
                with pytest.raises(SessionExists):
                    client.open("a")
                with pytest.raises(SessionExists):
                    client.fork("source", "a")
                with pytest.raises(SessionLost, match="no session 'nobody'"):
                    client.info("nobody")
        finally:
            lossy.close()
        with Client(url) as client, pytest.raises(SessionLost, match="no session 'nobody'"):
            client.close("nobody")


def test_a_stream_waits_for_a_store_that_is_away(oracle, tmp_path):
    store, x = Away(), torch.randn(4, 3)
    with Engine(copy.deepcopy(oracle), store) as engine, serving(engine) as url, Client(url, patience=20) as client:
        client.open("a")
        store.away = 3
        got = torch.cat(list(client.stream("a", x.split(1))))
        assert store.away == 0
    torch.testing.assert_close(got, oracle(x.unsqueeze(0))[0].detach(), **CLOSE)


class Away(MemoryStore):
    """A store that does not answer some times."""

    away = 0

    def others_wrote(self) -> bool:
        if self.away:
            self.away -= 1
            raise StoreFailed("away")
        return False


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


class TwoOutputs(torch.nn.Module):
    """An output for each step, and one for each call."""

    def __init__(self) -> None:
        super().__init__()
        self.gru = torch.nn.GRU(3, 4, batch_first=True)

    def forward(self, x):
        y = self.gru(x)[0]
        return {"all": y, "last": y[:, -1]}


@pytest.mark.parametrize("made", [Deep, TwoOutputs])
def test_push_and_stream_take_and_give_the_same_shapes(made):
    torch.manual_seed(0)
    one, piece, long = torch.randn(3), torch.randn(1, 3), torch.randn(4, 3)
    wrong = [
        torch.randn(1, 4, 3),
        torch.randn(4),
        torch.randn(0, 3),
        torch.randn(()),
        torch.randn(3, dtype=torch.cfloat),
    ]
    with Engine(made()) as engine, serving(engine) as url, Client(url) as client:
        for name in ("pushed", "streamed"):
            client.open(name)
        pushed = [client.push("pushed", x) for x in (one, piece, long)]
        streamed = list(client.stream("streamed", [one, piece, long]))
        torch.testing.assert_close(streamed, pushed)
        for x in wrong:
            said = []
            for ask in (lambda: client.push("pushed", x), lambda: list(client.stream("streamed", [x]))):  # noqa: B023
                with pytest.raises(BadInput, match=r"x has shape|x is torch.complex64, but this model takes") as error:
                    ask()
                said.append(str(error.value))
            assert said[0] == said[1]


def test_a_fork_whose_answer_was_lost_is_its_own_also_when_the_source_went_on(engine):
    with serving(engine) as url:
        engine.open("a")
        engine.push("a", torch.zeros(3))
        lossy = Lossy(int(url.rpartition(":")[2]), lose=1)
        try:
            with Client(lossy.url, patience=20) as client:
                again = client._http.post

                def post(*given, **more):
                    try:
                        return again(*given, **more)
                    finally:
                        engine.push("a", torch.zeros(3))

                client._http.post = post
                assert [client.fork("a", "b"), engine.info("b").seq] == ["b", 1]
                assert client.fork("a") in engine.sessions()
                assert len(engine.sessions()) == 3
        finally:
            lossy.close()


def test_a_client_that_asks_too_often_waits_as_long_as_it_is_told(engine):
    with serving(engine, new_sessions=2, inputs=3) as url, Client(url, patience=30) as client:
        names = [client.open() for _ in range(4)]
        for name in names:
            client.push(name, torch.zeros(3))
        assert [engine.info(name).seq for name in names] == [1] * 4
    with Engine(Deep()) as other, serving(other, new_sessions=0.01) as url, Client(url, patience=0.5) as client:
        client.open()
        with pytest.raises(Overloaded, match=r"more than 0\.01 new sessions a second"):
            client.open()


def test_a_deadline_reaches_the_server_and_what_it_says_comes_back():
    running = threading.Event()

    class Slow(Deep):
        busy = 0.0  # seconds; the engine tries the model many times before it serves it

        def forward(self, x):
            running.set()
            end = time.perf_counter() + self.busy
            while time.perf_counter() < end:
                torch.ones(200_000).sum()  # busy, and so not for an event loop; others run meanwhile
            return super().forward(x)

    model = Slow()
    with Engine(model) as engine, serving(engine) as url, Client(url) as client, Client(url) as other:
        client.open("a")
        client.open("b")
        model.busy = 0.3
        client.push("a", torch.zeros(3), timeout=5.0)
        with pytest.raises(TimeoutError, match=r"no answer within 0.05 s. The input may yet be applied") as late:
            client.push("a", torch.zeros(3), 2, timeout=0.05)
        assert not isinstance(late.value, DeadlineExceeded)
        assert client.push("a", torch.zeros(3), 2).shape == (2,)  # the same, which was applied once
        running.clear()
        busy = threading.Thread(target=lambda: other.push("b", torch.zeros(3), 1))
        busy.start()
        assert running.wait(10)
        with pytest.raises(DeadlineExceeded, match=r"did not come within 0.05 s, so it was not applied"):
            client.push("a", torch.zeros(3), 3, timeout=0.05)
        busy.join()
        assert client.info("a").seq == 2
        with pytest.raises(BadInput, match="timeout"):
            client.push("a", torch.zeros(3), 3, timeout=-1.0)
