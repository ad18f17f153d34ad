"""One version after another: sessions know theirs, are moved on or left alone, and nothing is lost on the way."""

import os
import signal
import threading
import uuid
from contextlib import suppress

import pytest
import torch
from torch import Tensor, nn

from hiddenstate.errors import BadInput, Overloaded, SequenceGap, ServeError, SessionLost
from hiddenstate.serve import Client, Engine
from hiddenstate.state import State
from tests.support.deadline import wait_until
from tests.support.models import Deep, second_version
from tests.support.redis import RedisServer, free_port, needed
from tests.support.web import Nursery, kill, runs

CLOSE = {"rtol": 1e-5, "atol": 1e-6}


def deep() -> Deep:
    torch.manual_seed(0)
    return Deep().eval()


def whole(x: Tensor, *, second: bool = False) -> Tensor:
    """The uninterrupted run: x (steps, feature)."""
    with torch.no_grad():
        return (second_version(deep()) if second else deep())(x.unsqueeze(0))[0]


@pytest.fixture(params=["sqlite", pytest.param("redis", marks=pytest.mark.redis)])
def store(request, tmp_path) -> str:
    """The address of an empty store that outlives an engine."""
    if request.param == "redis":
        return request.getfixturevalue("redis_server").address(uuid.uuid4().hex)
    return f"sqlite:///{tmp_path}/sessions.db"


def test_a_session_is_moved_on_at_its_next_input_and_goes_on_from_its_state(store):
    x, seen = torch.randn(5, 3), []

    def migrate(state: State) -> State:
        seen.append(state)
        return state

    with Engine(deep(), store, version=1) as first:
        first.open("a")
        first.open("untouched")
        answers = [first.push("a", x[:2], 1), first.push("a", x[2:3], 2)]
        assert first.info("a").version == 1
    with Engine(second_version(deep()), store, version=2, migrate=migrate) as second:
        assert second.info("a").version == 1
        torch.testing.assert_close(second.push("a", x[2:3], 2), answers[1])  # repeated: answered as it was
        torch.testing.assert_close(second.push("a", x[3:], 3), whole(x, second=True)[3:], **CLOSE)
        assert (second.info("a").version, second.info("a").seq, second.info("a").steps) == (2, 3, 5)
        second.fork("untouched", "b")
        torch.testing.assert_close(second.push("b", x[:1], 1), whole(x, second=True)[:1], **CLOSE)
        assert sorted(second.versions().values()) == [3]
    assert len(seen) == 1  # the one session that had a state, once
    torch.testing.assert_close(torch.cat(answers), whole(x)[:3], **CLOSE)


def test_a_state_of_another_size_becomes_what_the_new_model_needs(store):
    small, large = nn.GRU(2, 3, batch_first=True), nn.GRU(2, 5, batch_first=True)
    x = torch.randn(2, 2)

    def widen(state: State) -> State:
        return State({"h": nn.functional.pad(state["h"], (0, 2))}, {"h": state.batch_axis["h"]})

    with Engine(small, store, version=1) as engine:
        engine.open("a")
        engine.push("a", x[0])
    with torch.no_grad():
        _, h = small(x[None, :1])
        wanted, _ = large(x[None, 1:], nn.functional.pad(h, (0, 2)))
    with Engine(large, store, version=2, migrate=widen) as engine:
        torch.testing.assert_close(engine.push("a", x[1], 2), wanted[0, 0], **CLOSE)


@pytest.mark.parametrize(
    ("migrate", "message"),
    [
        (lambda state: 1 / 0, r"session 'a', of version 1, was not moved on, since migrate raised ZeroDivisionError"),
        (lambda state: state["h"], r"was not moved on, since migrate gave tensor.*this model's states are one row of"),
        (lambda state: State({"other": torch.zeros(1, 1)}), r"since migrate gave State.*It is as it was\."),
        (
            lambda state: State({"h": state["h"] * torch.nan}, state.batch_axis),
            r"was not moved on, since migrate gave NaN in h\. It is as it was\.",
        ),
    ],
)
def test_a_session_that_cannot_be_moved_on_is_as_it_was(migrate, message, store):
    model, x = nn.GRU(3, 4, batch_first=True), torch.randn(2, 3)
    with Engine(model, store, version=1) as engine:
        engine.open("a")
        engine.push("a", x[0])
    with Engine(nn.GRU(3, 4, batch_first=True), store, version=2, migrate=migrate) as engine:
        with pytest.raises(SessionLost, match=f"(?s){message}"):
            engine.push("a", x[1], 2)
        engine.open("b")
        engine.push("b", x[0])
    with Engine(model, store, version=1) as engine, torch.no_grad():
        torch.testing.assert_close(engine.push("a", x[1], 2), model(x[None])[0][0, 1], **CLOSE)


def test_a_worker_leaves_what_another_version_serves_to_that_one(store):
    x = torch.randn(3, 3)
    with (
        Engine(deep(), store, version=1) as old,
        Engine(second_version(deep()), store, version=2, migrate="drain") as new,
    ):
        old.open("a")
        old.push("a", x[0], 1)
        with pytest.raises(Overloaded, match="'a' is of version 1, which is being drained, and this worker serves 2"):
            new.push("a", x[1], 2)
        old.drain()
        with pytest.raises(Overloaded, match="this worker is being drained, so 'b' cannot begin here"):
            old.open("b")
        with pytest.raises(Overloaded, match="is being drained, so 'c' cannot begin"):
            old.fork("a", "c")
        new.open("b")
        with pytest.raises(Overloaded, match="'b' is of version 2, and this worker still serves 1: another one has"):
            old.push("b", x[0], 1)
        torch.testing.assert_close(old.push("a", x[1:], 2), whole(x)[1:], **CLOSE)
        assert {name.partition("-")[0]: count for name, count in new.versions().items()} == {"v1": 1, "v2": 1}
        old.close("a")
        assert list(new.versions().values()) == [1]


def test_without_a_way_to_move_it_on_a_session_of_another_version_is_refused(store):
    with Engine(deep(), store, version=1) as engine:
        engine.open("a")
    with (
        Engine(deep(), store, version=2) as engine,
        pytest.raises(SessionLost, match=r"belongs to another model \(v1-.*Engine\(migrate=...\)"),
    ):
        engine.push("a", torch.randn(3))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"version": -1}, "version is -1, but a number that rises"),
        ({"version": "2"}, "version is '2', but a number that rises"),
        ({"migrate": "now"}, "migrate is 'now', but a function from State to State, 'drain' or None"),
        ({"migrate": "drain"}, "migrate is 'drain', so a version is needed"),
        ({"migrate": lambda state: state}, "migrate is a function, so a version is needed that tells older sessions"),
    ],
)
def test_a_rollout_that_means_nothing_is_refused(options, message):
    with pytest.raises(BadInput, match=message):
        Engine(deep(), **options)


@pytest.mark.parametrize("same", [True, False])
@pytest.mark.parametrize("second", [None, 0, 1, 2])
@pytest.mark.parametrize("first", [None, 0, 1, 2])
def test_whatever_versions_two_workers_have_a_session_is_moved_on_once_and_never_back(tmp_path, first, second, same):
    """The law of a rollout: versions only rise, a migration runs once, and what is refused is as it was."""
    ran = []

    def migrate(state: State) -> State:
        ran.append(1)
        return state

    def made(version: int | None, model: Deep) -> Engine:
        moving = None if version is None else migrate
        return Engine(model, f"sqlite:///{tmp_path}/sessions.db", version=version, migrate=moving)

    seen, applied = [], 0
    other = deep() if same else second_version(deep())
    with made(first, deep()) as one, made(second, other) as two:
        one.open("a")
        for turn in range(6):
            worker = (one, two)[turn % 2]
            with suppress(SessionLost, Overloaded):
                worker.push("a", torch.randn(3))
                applied += 1
            if turn == 4:
                for worker in (one, two):
                    with suppress(Overloaded):
                        worker.reset("a")
            assert one.info("a").seq == applied
            seen.append(-1 if one.info("a").version is None else one.info("a").version)
    assert len(ran) <= 1
    assert seen == sorted(seen)  # type: ignore[type-var]
    assert applied >= 3


def test_two_models_of_one_version_are_told_apart_and_the_way_out_is_said(store):
    with Engine(deep(), store, version=2) as one:
        one.open("a")
        one.push("a", torch.randn(3))
    options = {"version": 2, "migrate": lambda state: state}
    with (
        Engine(second_version(deep()), store, **options) as two,
        pytest.raises(SessionLost, match=r"'a' is of version 2, but of another model .*needs a higher version") as lost,
    ):
        two.push("a", torch.randn(3))
    assert lost.value.reason == "model"


def test_a_model_that_gets_its_first_version_goes_on_with_its_sessions(store):
    x = torch.randn(4, 3)
    with Engine(deep(), store) as engine:
        engine.open("a")
        engine.push("a", x[:2], 1)
    with Engine(deep(), store, version=1) as engine:
        torch.testing.assert_close(engine.push("a", x[2:], 2), whole(x)[2:], **CLOSE)


@pytest.mark.parametrize("old", [None, 1])
def test_an_old_worker_leaves_sessions_that_were_moved_on(store, old):
    x = torch.randn(3)
    with (
        Engine(deep(), store, version=old) as one,
        Engine(second_version(deep()), store, version=2, migrate=lambda state: state) as two,
    ):
        one.open("a")
        one.push("a", x)
        state = one.export("a")
        two.push("a", x)
        still = "a model without a version" if old is None else "1"
        for ask in (lambda: one.push("a", x), lambda: one.reset("a"), lambda: one.import_("a", state)):
            with pytest.raises(Overloaded, match=f"'a' is of version 2, and this worker still serves {still}: another"):
                ask()
        assert (two.info("a").version, two.info("a").seq) == (2, 2)
        one.close("a")


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.redis
@needed
def test_a_rolling_update_of_two_workers_under_load_loses_and_doubles_nothing(tmp_path):
    redis, nursery = RedisServer(tmp_path), Nursery()
    address, ports = redis.address(lease=0.2), [free_port(), free_port()]
    workers = [nursery.start(port, address, version=1) for port in ports]
    callers = [_Caller([f"http://127.0.0.1:{port}" for port in ports], f"s{place}") for place in range(6)]
    try:
        for caller in callers:
            caller.start()
        for place, port in enumerate(ports):
            _go_on(callers, 40)
            os.kill(workers[place], signal.SIGTERM)
            wait_until(lambda worker=workers[place]: not runs(worker), seconds=60)  # its port is taken until then
            workers[place] = nursery.start(port, address, version=2)
        _go_on(callers, 40)
        for caller in callers:
            caller.enough.set()
        for caller in callers:
            caller.join(60)
        with Client(f"http://127.0.0.1:{ports[0]}") as client:
            for caller in callers:
                caller.check(client)
    finally:
        for caller in callers:  # also where it failed: they would go on drawing numbers beside other tests
            caller.enough.set()
        for worker in workers:
            kill(worker)
        nursery.close()
        redis.stop()


class _Caller(threading.Thread):
    """Pushes to a session of its own, through a balancer that takes turns and asks the next worker where one cannot."""

    def __init__(self, urls: list[str], session: str) -> None:
        super().__init__(daemon=True)
        self._urls, self.session = urls, session
        self.inputs: list[Tensor] = []
        self.outputs: list[Tensor] = []
        self.enough = threading.Event()
        self.error: BaseException | None = None

    def run(self) -> None:
        try:
            with Client(self._urls[0], patience=0) as one, Client(self._urls[1], patience=0) as other:
                one.open(self.session)
                turn = 0
                while not self.enough.is_set():
                    self.inputs.append(torch.randn(1, 3))
                    while len(self.outputs) < len(self.inputs):
                        turn += 1
                        self._push((one, other)[turn % 2])
        except BaseException as error:
            self.error = error

    def _push(self, client: Client) -> None:
        try:
            self.outputs.append(client.push(self.session, self.inputs[-1], len(self.inputs)))
        except (SessionLost, SequenceGap):
            raise
        except ServeError:  # it is away, or of the version that this session has left
            return

    def check(self, client: Client) -> None:
        """Every answer is of the one version up to some input, and of the other from there on."""
        if self.error is not None:
            raise self.error
        assert client.info(self.session).seq == len(self.inputs) == len(self.outputs)
        assert client.info(self.session).version == 2
        x, got = torch.cat(self.inputs), torch.cat(self.outputs)
        old, new = whole(x), whole(x, second=True)
        moved = [bool(torch.allclose(y, z, **CLOSE)) for y, z in zip(got, new, strict=True)].index(True)
        assert 0 < moved < len(x)
        torch.testing.assert_close(got[:moved], old[:moved], **CLOSE)
        torch.testing.assert_close(got[moved:], new[moved:], **CLOSE)


def _go_on(callers: list[_Caller], inputs: int) -> None:
    wanted = sum(len(caller.outputs) for caller in callers) + inputs
    wait_until(lambda: sum(len(c.outputs) for c in callers) >= wanted or any(c.error for c in callers), seconds=60)
