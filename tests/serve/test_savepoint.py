"""Savepoints: what was saved goes on elsewhere as if nothing had happened, and a drill that says so."""

import shutil
import threading
import uuid

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

from hiddenstate.errors import BadInput, Overloaded, SequenceGap, SessionExists, SessionLost, StoreFailed
from hiddenstate.serve import Client, Engine
from tests.support.deadline import wait_until
from tests.support.models import Deep
from tests.support.redis import free_port
from tests.support.web import Nursery, kill

CLOSE = {"rtol": 1e-5, "atol": 1e-6}


def deep() -> Deep:
    torch.manual_seed(0)
    return Deep().eval()


def whole(x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return deep()(x.unsqueeze(0))[0]


def test_all_sessions_go_on_in_another_store_with_their_answers(address, other, tmp_path):
    x, file = torch.randn(12, 3), tmp_path / "savepoint.db"
    with Engine(deep(), address, replay=4) as engine:
        for name, inputs in {"new": 0, "one": 1, "many": 10}.items():
            engine.open(name)
            for seq in range(inputs):
                engine.push(name, x[seq], seq + 1)
        engine.open("reset")
        engine.push("reset", x[0], 1)
        engine.reset("reset")
        facts = {name: engine.info(name) for name in engine.sessions()}
        assert engine.save(file) == 4
        engine.push("many", torch.randn(3))  # later than the savepoint
    assert [path.name for path in tmp_path.iterdir() if "savepoint" in path.name] == ["savepoint.db"]
    with Engine(deep(), other, replay=4) as engine:
        assert engine.load(file) == 4
        for name, before in facts.items():
            now = engine.info(name)
            assert (now.seq, now.steps, now.opened, now.touched, now.fingerprint) == (
                *(before.seq, before.steps, before.opened, before.touched, before.fingerprint),
            )
        for seq in range(7, 11):  # repeated: answered as before
            torch.testing.assert_close(engine.push("many", torch.randn(3), seq), whole(x)[seq - 1], **CLOSE)
        with pytest.raises(SequenceGap, match="its answer is no longer kept"):
            engine.push("many", x[0], 6)
        torch.testing.assert_close(engine.push("many", x[10:], 11), whole(x)[10:], **CLOSE)
        torch.testing.assert_close(engine.push("one", x[1:], 2), whole(x)[1:], **CLOSE)
        torch.testing.assert_close(engine.push("new", x, 1), whole(x), **CLOSE)
        torch.testing.assert_close(engine.push("reset", x, 2), whole(x), **CLOSE)


@given(lengths=st.lists(st.integers(0, 12), min_size=1, max_size=6), replay=st.integers(0, 9))
@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_whatever_is_saved_is_what_is_loaded(lengths, replay, tmp_path):
    file = tmp_path / f"{uuid.uuid4().hex}.db"
    x = torch.randn(13, 3)
    with Engine(deep(), replay=replay) as engine:
        for place, length in enumerate(lengths):
            engine.open(f"s{place}")
            for step in x[:length]:
                engine.push(f"s{place}", step)
        engine.save(file)
    with Engine(deep(), f"sqlite:///{file}", replay=replay) as engine:  # a savepoint is a store
        for place, length in enumerate(lengths):
            assert engine.info(f"s{place}").seq == length
            if replay and length:
                torch.testing.assert_close(engine.push(f"s{place}", x[0], length), whole(x)[length - 1], **CLOSE)
            torch.testing.assert_close(engine.push(f"s{place}", x[length]), whole(x)[length], **CLOSE)


def test_sessions_that_exist_are_left_alone_or_set_back(address, tmp_path):
    x, file = torch.randn(4, 3), tmp_path / "savepoint.db"
    with Engine(deep(), address) as engine:
        engine.open("a")
        engine.push("a", x[0], 1)
        engine.save(file)
        engine.push("a", x[1], 2)
        with pytest.raises(SessionExists, match=r"1 of the 1 sessions in .* exist already, 'a' among them"):
            engine.load(file)
        assert engine.info("a").seq == 2
        assert engine.load(file, replace=True) == 1
        assert engine.info("a").seq == 1
        torch.testing.assert_close(engine.push("a", x[1], 2), whole(x)[1], **CLOSE)


def test_what_is_no_savepoint_or_does_not_fit_is_refused(tmp_path):
    file = tmp_path / "savepoint.db"
    with Engine(nn.GRU(3, 4, batch_first=True)) as engine:
        for name in "ab":
            engine.open(name)
            engine.push(name, torch.randn(3))
        engine.save(file)
    with Engine(deep(), max_stored=1) as engine:
        with pytest.raises(BadInput, match=r"there is no savepoint .*missing"):
            engine.load(tmp_path / "missing")
        with pytest.raises(Overloaded, match=r"the store has 0 sessions and .* another 2, over 1 in all"):
            engine.load(file)
    with Engine(deep()) as engine:
        with pytest.raises(SessionLost, match=r"'a' belongs to another model .* holds only states of that one"):
            engine.load(file)
        assert engine.sessions() == []


def test_a_savepoint_is_one_instant_although_inputs_keep_coming(tmp_path):
    """A round of inputs begins when the one before is answered: sessions of several instants would show in numbers."""
    files = [tmp_path / f"{place}.db" for place in range(4)]
    names = [f"s{place:02d}" for place in range(40)]
    with Engine(deep()) as engine:
        for name in names:
            engine.open(name)
        enough = threading.Event()

        def load() -> None:
            while not enough.is_set():
                engine.push_many(names, torch.randn(len(names), 3))

        thread = threading.Thread(target=load)
        thread.start()
        wait_until(lambda: engine.info("s00").seq > 2)
        for file in files:
            engine.save(file)
        enough.set()
        thread.join()
    for file in files:
        with Engine(deep(), f"sqlite:///{file}") as engine:
            seen = [engine.info(name).seq for name in names]
            # At one instant a round may be under way: it has reached some sessions and not the others, by one input.
            assert max(seen) - min(seen) <= 1


@pytest.mark.long
@pytest.mark.slow
def test_the_recovery_drill(redis_server, tmp_path):
    """As docs/serve.md has it: save while the server runs, lose the machine, load elsewhere, and go on."""
    nursery, port, x = Nursery(), free_port(), torch.randn(30, 3)
    url, lost, file = f"http://127.0.0.1:{port}", f"sqlite:///{tmp_path}/sessions.db", tmp_path / "savepoint.db"
    spare = redis_server.address(uuid.uuid4().hex)
    worker = nursery.start(port, lost)
    try:
        with Client(url) as client:
            client.open("a")
            got = [client.push("a", x[seq : seq + 1], seq + 1) for seq in range(10)]
            with Engine(deep(), lost) as beside:  # a second engine on the same file, while the server goes on
                assert beside.save(file) == 1
            got += [client.push("a", x[seq : seq + 1], seq + 1) for seq in range(10, 15)]
            kill(worker)
            for path in tmp_path.glob("sessions.db*"):
                path.unlink()
            with Engine(deep(), spare) as beside:
                assert beside.load(file) == 1
            worker = nursery.start(port, spare)
            # What was acknowledged after the savepoint is gone: the session says so, and the client sends it again.
            assert client.info("a").seq == 10
            got[10:] = [client.push("a", x[seq : seq + 1], seq + 1) for seq in range(10, 30)]
        torch.testing.assert_close(torch.cat(got), whole(x), **CLOSE)
    finally:
        kill(worker)
        nursery.close()


@pytest.mark.parametrize("ended", ["closed", "killed", "killed, index lost", "served", "garbage"])
def test_whatever_was_at_the_path_a_savepoint_over_it_is_what_is_loaded(tmp_path, ended):
    file, x = tmp_path / "savepoint.db", torch.randn(3)
    with Engine(deep()) as engine:
        engine.open("a")
        engine.push("a", x)
        engine.save(file)
        with Engine(deep(), f"sqlite:///{file}") as drill:
            for _ in range(9):
                drill.push("a", x)
            if ended.startswith("killed"):  # what a process leaves that is killed: the file with its log
                for end in ("", "-wal", "-shm")[: 2 if "index" in ended else 3]:
                    shutil.copyfile(f"{file}{end}", f"{tmp_path}/left.db{end}")
            if ended == "served":
                with pytest.raises(StoreFailed, match=r"cannot take the place of .*savepoint.db.* stop whoever serves"):
                    engine.save(file)
        target = tmp_path / "left.db" if ended.startswith("killed") else file
        if ended == "garbage":
            target.write_bytes(b"no database at all" * 2000)
            (tmp_path / "savepoint.db-wal").write_bytes(b"no log")
            with pytest.raises(StoreFailed, match=r"file is not a database.* remove it together with its log"):
                engine.save(target)
            (tmp_path / "savepoint.db-wal").unlink(missing_ok=True)
        engine.push("a", x)
        assert engine.save(target) == 1
    with Engine(deep()) as engine:
        engine.load(target)
        assert engine.info("a").seq == 2
    with Engine(deep(), f"sqlite:///{target}") as engine:
        assert engine.info("a").seq == 2


def test_a_store_is_not_saved_over_itself(tmp_path):
    with Engine(deep(), f"sqlite:///{tmp_path}/sessions.db") as engine:
        engine.open("a")
        with pytest.raises(StoreFailed, match=r"sessions.db-wal\): .*locked.*Nothing was changed"):
            engine.save(tmp_path / "sessions.db")
        engine.push("a", torch.randn(3))
