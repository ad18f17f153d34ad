"""The WebSocket: several inputs under way, answers in order, streams that resume."""

import copy
import json

import pytest
import safetensors.torch
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import ClientConnection, connect

from hiddenstate.serve import Engine
from tests.support.models import Deep, TimeFirst
from tests.support.web import serving

TOKENS = {"alice": "alices-secret", "bob": "bobs-secret"}
CLOSE = {"rtol": 1e-5, "atol": 1e-6}


@pytest.fixture(scope="module")
def model() -> nn.Module:
    torch.manual_seed(0)
    return Deep().eval()


@pytest.fixture(scope="module")
def served(model):
    with Engine(model) as engine, serving(engine, body=4000, steps=50) as url:
        yield engine, url.replace("http", "ws")


@pytest.fixture
def session(served, request) -> str:
    return served[0].open()


def frame(x: Tensor, seq: int = 0) -> bytes:
    return seq.to_bytes(8, "little") + x.contiguous().numpy().tobytes()


def output(data: bytes, width: int = 2) -> tuple[int, Tensor]:
    return int.from_bytes(data[:8], "little"), torch.frombuffer(bytearray(data[8:]), dtype=torch.float32).view(
        -1, width
    )


def talk(url: str, session: str, query: str = "", **options) -> ClientConnection:
    return connect(f"{url}/v1/sessions/{session}/stream{query}", proxy=None, **options)


def told(socket: ClientConnection) -> dict:
    return json.loads(socket.recv(timeout=10))


@pytest.fixture(scope="module")
def oracle(model):
    free = copy.deepcopy(model)

    def whole(x: Tensor) -> Tensor:
        with torch.no_grad():
            return free(x.unsqueeze(0))[0]

    return whole


def test_frames_in_and_outputs_out(served, session, oracle):
    x = torch.randn(6, 3)
    with talk(served[1], session) as socket:
        ready = told(socket)
        assert ready == {
            "type": "ready",
            "seq": 0,
            "steps": 0,
            "window": 8,
            "step_shape": [3],
            "dtype": "float32",
            "outputs": [{"name": "y", "dtype": "float32", "shape": [-1, 2]}],
        }
        for piece in x.split(2):
            socket.send(frame(piece))
        got = [output(socket.recv(timeout=10)) for _ in range(3)]
        assert [seq for seq, _ in got] == [1, 2, 3]
        torch.testing.assert_close(torch.cat([y for _, y in got]), oracle(x), **CLOSE)
        socket.send('{"type": "eof"}')
        assert told(socket) == {"type": "eof", "seq": 3}
        with pytest.raises(ConnectionClosed):
            socket.recv(timeout=10)


def test_more_inputs_than_the_window_wait_their_turn(served, session, oracle):
    x = torch.randn(60, 3)
    with talk(served[1], session) as socket:
        told(socket)
        for seq, step in enumerate(x, 1):
            socket.send(frame(step, seq))
        got = [output(socket.recv(timeout=10)) for _ in x]
    assert [seq for seq, _ in got] == list(range(1, 61))
    torch.testing.assert_close(torch.cat([y for _, y in got]), oracle(x), **CLOSE)


def test_a_stream_resumes_where_the_session_is(served, session, oracle):
    x = torch.randn(5, 3)
    with talk(served[1], session) as socket:
        told(socket)
        for seq in (1, 2, 3):
            socket.send(frame(x[seq - 1], seq))
        first = [output(socket.recv(timeout=10)) for _ in range(3)]
    with talk(served[1], session) as socket:
        assert told(socket)["seq"] == 3
        for seq in (2, 3, 4, 5):  # it has no answer to 2 and 3
            socket.send(frame(x[seq - 1], seq))
        second = [output(socket.recv(timeout=10)) for _ in range(4)]
    assert torch.equal(first[1][1], second[0][1])
    assert torch.equal(first[2][1], second[1][1])
    torch.testing.assert_close(torch.cat([first[0][1], *(y for _, y in second)]), oracle(x), **CLOSE)


def test_controls_keep_their_place_among_inputs(served, session, oracle):
    x = torch.randn(4, 3)
    with talk(served[1], session) as socket:
        told(socket)
        socket.send(frame(x[:2]))
        socket.send('{"type": "reset"}')
        socket.send(frame(x[2:]))
        socket.send('{"type": "info"}')
        socket.send(json.dumps({"type": "push", "x": x[0].tolist(), "seq": 3}))
        output(socket.recv(timeout=10))
        assert told(socket) == {"type": "reset"}
        _, y = output(socket.recv(timeout=10))
        torch.testing.assert_close(y, oracle(x[2:]), **CLOSE)
        assert told(socket)["steps"] == 4
        last = told(socket)
        assert (last["type"], last["seq"]) == ("output", 3)
        torch.testing.assert_close(torch.tensor(last["y"]), oracle(torch.cat([x[2:], x[:1]]))[2], **CLOSE)


def test_errors_are_told_and_the_stream_goes_on(served, session):
    with talk(served[1], session) as socket:
        told(socket)
        for data, message in [
            (b"", "begins with the number"),
            (b"1234567", "begins with the number"),
            (b"\0" * 8, "0 bytes of input, but a step has 12"),
            (b"\0" * 15, "7 bytes of input, but a step has 12"),
            (b"\xff" * 20, "begins with the number"),
            (frame(torch.zeros(51, 3)), "more steps than the 50"),
            (frame(torch.zeros(3), 7), "1 comes next"),
            (frame(torch.full((3,), torch.nan)), "gave NaN"),
            ("", "no JSON"),
            ("[]", 'with a "type"'),
            ('{"type": ["push"]}', 'with a "type"'),
            ('{"type": "push"}', "not made of numbers"),
            ('{"type": "push", "x": [1, 2, 3], "seq": -1}', "numbered from 1"),
        ]:
            socket.send(data)
            error = told(socket)
            assert error["type"] == "error"
            assert message in error["message"]
        socket.send(frame(torch.zeros(3), 1))
        assert output(socket.recv(timeout=10))[0] == 1


def test_a_stream_may_begin_its_session(served):
    with talk(served[1], "begun-here", "?open=true") as socket:
        assert told(socket)["seq"] == 0
    with talk(served[1], "never-begun") as socket:
        assert told(socket)["reason"] == "unknown"
        with pytest.raises(ConnectionClosed) as closed:
            socket.recv(timeout=10)
        assert closed.value.rcvd.code == 4404


def test_several_outputs_come_as_a_file():
    with Engine(TimeFirst()) as engine, serving(engine) as url:
        session = engine.open()
        with talk(url.replace("http", "ws"), session) as socket:
            assert [out["name"] for out in told(socket)["outputs"]] == ["y.0", "y.1"]
            socket.send(frame(torch.zeros(2, 3)))
            data = socket.recv(timeout=10)
            assert {name: tuple(t.shape) for name, t in safetensors.torch.load(data[8:]).items()} == {
                "y.0": (2, 2),
                "y.1": (2, 4),
            }


def test_a_stream_belongs_to_the_caller_that_began_the_session(model):
    with Engine(Deep()) as engine, serving(engine, tokens=TOKENS) as url:
        url = url.replace("http", "ws")
        alice = {"additional_headers": {"authorization": "Bearer alices-secret"}}
        with talk(url, "a", "?open=true", **alice) as socket:
            assert told(socket)["type"] == "ready"
        with talk(url, "a", subprotocols=["bearer.alices-secret"]) as socket:  # as browsers have to
            assert told(socket)["type"] == "ready"
        for options, code in [
            ({"additional_headers": {"authorization": "Bearer bobs-secret"}}, 4404),
            ({"subprotocols": ["bearer.nonsense"]}, 4401),
            ({}, 4401),
        ]:
            with talk(url, "a", **options) as socket:
                assert told(socket)["type"] == "error"
                with pytest.raises(ConnectionClosed) as closed:
                    socket.recv(timeout=10)
                assert closed.value.rcvd.code == code


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=15)
@given(
    frames=st.lists(st.binary(max_size=40) | st.text(max_size=40) | st.sampled_from(['{"type": "push"}']), max_size=8)
)
def test_no_frames_bring_the_server_down(served, session, frames):
    with talk(served[1], session) as socket:
        told(socket)
        for data in frames:
            socket.send(data)
        socket.send('{"type": "eof"}')
        for _ in frames:
            socket.recv(timeout=10)
        assert told(socket)["type"] == "eof"
        with pytest.raises(ConnectionClosed) as closed:
            socket.recv(timeout=10)
        assert closed.value.rcvd.code == 1000


FRAMES = st.sampled_from(
    [
        *[frame(torch.ones(1, 3))] * 6,
        frame(torch.ones(2, 3)),
        frame(torch.full((1, 3), torch.nan)),
        frame(torch.ones(1, 3), 2),
        frame(torch.ones(1, 3), 5),
        b"short",
        '{"type": "reset"}',
        '{"type": "push", "x": [1, 1, 1]}',
        '{"type": "nothing"}',
    ]
)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=25, deadline=None)
@given(frames=st.lists(FRAMES, min_size=1, max_size=20))
def test_frames_that_come_at_once_are_answered_as_if_one_by_one(served, frames):
    said: list[list[str | bytes]] = []
    for at_once in (False, True):
        session = served[0].open()
        with talk(served[1], session) as socket:
            told(socket)
            if at_once:
                for data in frames:
                    socket.send(data)
                said.append([socket.recv(timeout=10) for _ in frames])
            else:
                said.append([(socket.send(data), socket.recv(timeout=10))[1] for data in frames])
            socket.send('{"type": "eof"}')
            told(socket)
        said[-1] = [one.replace(session, "") if isinstance(one, str) else one for one in said[-1]]
    for slow, fast in zip(*said, strict=True):
        if isinstance(slow, bytes):
            assert fast[:8] == slow[:8]
            torch.testing.assert_close(output(fast)[1], output(slow)[1], **CLOSE)
        elif '"y"' in slow:
            torch.testing.assert_close(
                torch.tensor(json.loads(fast)["y"]), torch.tensor(json.loads(slow)["y"]), **CLOSE
            )
        else:
            assert fast == slow


def test_a_frame_over_the_limit_ends_the_stream(served, session):
    with talk(served[1], session) as socket:
        told(socket)
        socket.send(b"\0" * 5000)
        with pytest.raises(ConnectionClosed) as closed:
            socket.recv(timeout=10)
        assert closed.value.rcvd.code == 1009
