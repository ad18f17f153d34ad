"""A store that is set back to an older copy: what a worker remembers never wins, and callers are told."""

import copy
import os
import shutil
import sqlite3
import subprocess
from contextlib import closing

import pytest
import torch

from hiddenstate.errors import SequenceGap, StoreFailed
from hiddenstate.serve import Engine
from hiddenstate.serve.arena import Arena
from hiddenstate.serve.setback import KnownSession, SetBackWatch
from tests.support import redis
from tests.support.models import Deep
from tests.support.redis import RedisServer

CLOSE = {"rtol": 1e-5, "atol": 1e-6}


@pytest.fixture
def server(tmp_path):
    if redis.SERVER is None:
        pytest.skip("there is no redis-server on this machine")
    (tmp_path / "live").mkdir()
    made = RedisServer(tmp_path / "live")
    yield made
    made.stop()


class Copies:
    """Copies of a Redis server's files."""

    def __init__(self, server: RedisServer, folder) -> None:
        self._server, self._live, self._copy = server, folder / "live", folder / "copy"

    def take(self) -> None:
        shutil.copytree(self._live, self._copy)

    def put_back(self) -> None:
        self._server.stop()
        shutil.rmtree(self._live)
        shutil.copytree(self._copy, self._live)
        self._server.start()


def models(count: int) -> list[Deep]:
    torch.manual_seed(0)
    first = Deep().eval()
    return [first, *(copy.deepcopy(first) for _ in range(count - 1))]


def whole(oracle: Deep, *steps: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return oracle(torch.stack(steps)[None])[0]


@pytest.mark.redis
def test_a_state_in_memory_never_wins_over_a_store_that_was_set_back_and_went_on(server, tmp_path):
    """The other worker brings the session to the same number of changes: numbers alone would be the same again."""
    copies, (mine, theirs, oracle) = Copies(server, tmp_path), models(3)
    x, other = torch.randn(9, 3), torch.randn(2, 3)
    with Engine(mine, server.address()) as one, Engine(theirs, server.address()) as two:
        one.open("a")
        for step in x[:3]:
            one.push("a", step)
        copies.take()
        for step in x[3:5]:
            one.push("a", step)
        copies.put_back()
        for step in other:
            two.push("a", step)
        with pytest.raises(
            SequenceGap, match=r"older copy: session 'a' had come to input 5, and has come to 5 since, by other inputs"
        ):
            one.push("a", x[5])
        assert one.stats().set_back == 1
        got = one.push("a", x[6])
        torch.testing.assert_close(got, whole(oracle, *x[:3], *other, x[6])[-1], **CLOSE)
        assert two.info("a").seq == one.info("a").seq == 6


@pytest.mark.redis
@pytest.mark.parametrize("changes", [1, 4, 40])
def test_the_only_worker_notices_however_far_the_store_went_back(server, tmp_path, changes):
    copies, (model, oracle) = Copies(server, tmp_path), models(2)
    x = torch.randn(changes + 3, 3)
    with Engine(model, server.address()) as engine:
        engine.open("a")
        engine.push("a", x[0])
        copies.take()
        for step in x[1 : 1 + changes]:
            engine.push("a", step)
        copies.put_back()
        with pytest.raises(SequenceGap, match=rf"had come to input {1 + changes}, and is now at 1.*from 2 on") as told:
            engine.push("a", x[-2])
        assert told.value.seq == 1
        torch.testing.assert_close(engine.push("a", x[-1]), whole(oracle, x[0], x[-1])[-1], **CLOSE)


@pytest.mark.redis
def test_a_numbered_input_says_itself_where_it_belongs(server, tmp_path):
    copies, (model, oracle) = Copies(server, tmp_path), models(2)
    x = torch.randn(4, 3)
    with Engine(model, server.address()) as engine:
        engine.open("a")
        engine.push("a", x[0], 1)
        copies.take()
        engine.push("a", x[1], 2)
        engine.push("a", x[2], 3)
        copies.put_back()
        with pytest.raises(SequenceGap, match="set back to an older copy") as told:
            engine.push("a", x[3], 4)
        got = [engine.push("a", x[seq - 1], seq) for seq in range(told.value.seq + 1, 5)]
    torch.testing.assert_close(torch.stack(got), whole(oracle, *x)[1:], **CLOSE)


@pytest.mark.redis
def test_what_other_workers_do_is_not_taken_for_a_store_that_was_set_back(server):
    (mine, theirs), x = models(2), torch.randn(3)
    with Engine(mine, server.address()) as one, Engine(theirs, server.address()) as two:
        one.open("a")
        one.push("a", x)
        for inputs in (1, 3, 14, 15, 16, 17, 40):
            for _ in range(inputs):
                two.push("a", x)
            two.reset("a")
            one.push("a", x)
        state = two.export("a")
        two.close("a")
        two.open("a")
        one.push("a", x)
        two.import_("a", state)
        one.push("a", x)
        assert one.stats().set_back == two.stats().set_back == 0


def test_a_file_that_is_restored_while_it_is_served(tmp_path):
    (model, oracle), x = models(2), torch.randn(5, 3)
    path = tmp_path / "sessions.db"
    with Engine(model, f"sqlite:///{path}") as engine:
        engine.open("a")
        engine.push("a", x[0])
        live, kept = sqlite3.connect(path), sqlite3.connect(tmp_path / "copy.db")
        live.backup(kept)
        engine.push("a", x[1])
        engine.push("a", x[2])
        kept.backup(live)
        live.close()
        kept.close()
        with pytest.raises(SequenceGap, match="session 'a' had come to input 3, and is now at 1"):
            engine.push("a", x[3])
        torch.testing.assert_close(engine.push("a", x[4]), whole(oracle, x[0], x[4])[-1], **CLOSE)


# The file itself, past SQLite: what was acknowledged is found after a restart, or callers were told.


def copied(live, kept, engine) -> None:
    """A backup by SQLite's own means."""
    with closing(sqlite3.connect(live)) as source, closing(sqlite3.connect(kept)) as target:
        source.backup(target)


def saved(live, kept, engine) -> None:
    """A savepoint, in which sessions are counted anew."""
    engine.save(kept)


def put(source, target) -> None:
    """Copy a file over another one, in a process of its own: one that opens a database itself drops SQLite's locks."""
    subprocess.run(["cp", str(source), str(target)], check=True)


def without_log(path) -> None:
    for end in ("-wal", "-shm"):
        os.remove(f"{path}{end}")


@pytest.mark.parametrize("backup", [copied, saved])
@pytest.mark.parametrize("link", [False, True])
def test_a_backup_that_is_moved_over_the_file_is_noticed_and_served(tmp_path, backup, link):
    (model, oracle), x = models(2), torch.randn(6, 3)
    path, kept = tmp_path / "sessions.db", tmp_path / "kept.db"
    if link:
        (tmp_path / "link.db").symlink_to(path)
    with Engine(model, f"sqlite:///{tmp_path}/link.db" if link else f"sqlite:///{path}") as engine:
        engine.open("a")
        engine.push("a", x[0])
        backup(path, kept, engine)
        engine.push("a", x[1])
        engine.push("a", x[2])
        os.replace(kept, path)
        without_log(path)
        with pytest.raises(SequenceGap, match="session 'a' had come to input 3, and is now at 1"):
            engine.push("a", x[3])
        engine.check()
        torch.testing.assert_close(engine.push("a", x[4]), whole(oracle, x[0], x[4])[-1], **CLOSE)
        assert engine.stats().set_back == 1
    with Engine(copy.deepcopy(oracle), f"sqlite:///{path}") as engine:
        assert engine.info("a").seq == 2
        torch.testing.assert_close(engine.push("a", x[5]), whole(oracle, x[0], x[4], x[5])[-1], **CLOSE)


@pytest.mark.parametrize("backup", [copied, saved])
def test_a_backup_beside_the_log_of_another_file_is_refused_until_that_is_removed(tmp_path, backup):
    (model,), x = models(1), torch.randn(6, 3)
    path, kept = tmp_path / "sessions.db", tmp_path / "kept.db"
    with Engine(model, f"sqlite:///{path}") as engine:
        engine.open("a")
        engine.push("a", x[0])
        backup(path, kept, engine)
        engine.push("a", x[1])
        os.replace(kept, path)
        said = r"was replaced by another file, but beside it is still the log of .* Remove .*sessions.db-wal and .*-shm"
        for ask in (lambda: engine.push("a", x[2]), engine.check):
            with pytest.raises(StoreFailed, match=said):
                ask()
        without_log(path)
        with pytest.raises(SequenceGap, match="had come to input 2, and is now at 1"):
            engine.push("a", x[2])
        assert engine.info("a").seq == 1


def test_a_file_that_is_deleted_takes_nothing_more_and_goes_on_when_it_is_put_back(tmp_path):
    (model,), x = models(1), torch.randn(6, 3)
    path = tmp_path / "sessions.db"
    with Engine(model, f"sqlite:///{path}") as engine:
        engine.open("a")
        engine.push("a", x[0])
        os.rename(path, tmp_path / "away.db")
        for ask in (lambda: engine.push("a", x[1]), lambda: engine.open("b"), engine.check):
            with pytest.raises(StoreFailed, match=r"sessions.db is gone: .*Put it back, with the sessions.db-wal"):
                ask()
        os.rename(tmp_path / "away.db", path)
        engine.check()
        engine.push("a", x[1], 2)
    with Engine(*models(1), f"sqlite:///{path}") as engine:
        assert engine.info("a").seq == 2


def test_a_backup_that_is_copied_into_the_file_is_not_overwritten_by_the_old_log(tmp_path):
    (model,), x = models(1), torch.randn(6, 3)
    path, kept = tmp_path / "sessions.db", tmp_path / "kept.db"
    with Engine(model, f"sqlite:///{path}") as engine:
        engine.open("a")
        engine.push("a", x[0])
        engine.save(kept)
        engine.push("a", x[1])
        put(kept, path)
        without_log(path)
        for ask in (lambda: engine.push("a", x[2]), engine.check):
            with pytest.raises(StoreFailed, match=r"sessions.db-wal was removed or replaced while it was in use"):
                ask()
    assert path.read_bytes() == kept.read_bytes()  # which the next process begins with


@pytest.mark.parametrize("checkpointed", [False, True])
def test_a_backup_that_is_copied_into_the_file_beside_its_log(tmp_path, checkpointed, caplog):
    """What is in the log goes on, and of the rest callers are told: nothing acknowledged is lost without a word."""
    (model,), x = models(1), torch.randn(9, 3)
    path, kept = tmp_path / "sessions.db", tmp_path / "kept.db"
    with Engine(model, f"sqlite:///{path}") as engine:
        engine.open("a")
        engine.push("a", x[0])
        with closing(sqlite3.connect(path)) as other:
            other.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        put(path, kept)
        engine.push("a", x[1])
        engine.push("a", x[2])
        if checkpointed:
            with closing(sqlite3.connect(path)) as other:
                other.execute("PRAGMA wal_checkpoint(TRUNCATE)")
            engine.info("a")
        put(kept, path)
        if checkpointed:
            with pytest.raises(SequenceGap, match="had come to input 3, and is now at 1"):
                engine.push("a", x[3])
        engine.push("a", x[4])
        after = engine.info("a").seq
        assert after == (2 if checkpointed else 4)
    assert "was replaced or overwritten" in caplog.text
    with Engine(*models(1), f"sqlite:///{path}") as engine:
        assert engine.info("a").seq == after


def test_what_was_damaged_by_writing_past_sqlite_is_said_and_nothing_is_acknowledged(tmp_path):
    (model,), path = models(1), tmp_path / "sessions.db"
    with Engine(model, f"sqlite:///{path}") as engine:
        for name in "abc":
            engine.open(name)
        with closing(sqlite3.connect(path)) as other:
            other.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        engine.info("a")
        harm = ["dd", "if=/dev/urandom", f"of={path}", "bs=16384", "seek=1", "count=3", "conv=notrunc"]
        subprocess.run(harm, check=True, capture_output=True)
        for ask in (lambda: engine.push("a", torch.randn(3)), engine.check, lambda: engine.open("d")):
            with pytest.raises(StoreFailed, match=r"(?s)sessions.db was replaced or .*damaged now: .*start again"):
                ask()


def test_other_engines_and_tools_that_copy_the_log_back_are_not_taken_for_it(tmp_path, caplog):
    (mine, theirs), x = models(2), torch.randn(3)
    path = tmp_path / "sessions.db"
    with Engine(mine, f"sqlite:///{path}") as one, Engine(theirs, f"sqlite:///{path}") as two:
        one.open("a")
        for engine in (one, two, one, two):
            engine.push("a", x)
            with closing(sqlite3.connect(path)) as other:
                other.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        with closing(sqlite3.connect(path)) as other:
            other.execute("VACUUM")
        for engine in (one, two, one, two):
            engine.push("a", x)
        assert one.stats().set_back == two.stats().set_back == 0
        assert one.info("a").seq == 8
    assert "replaced" not in caplog.text


@pytest.mark.redis
def test_a_worker_remembers_through_a_store_that_failed_before_it_came_back_older(server, tmp_path):
    copies, (model, _) = Copies(server, tmp_path), models(2)
    x = torch.randn(5, 3)
    with Engine(model, server.address()) as engine:
        engine.open("a")
        engine.push("a", x[0])
        copies.take()
        engine.push("a", x[1])
        server.stop()
        with pytest.raises(StoreFailed, match="could not"):
            engine.push("a", x[2])
        copies.put_back()
        with pytest.raises(SequenceGap, match="had come to input 2, and is now at 1"):
            engine.push("a", x[2])


def test_what_others_brought_to_the_same_number_is_said_in_other_words():
    from hiddenstate.serve.arena import SessionEntry
    from hiddenstate.serve.futures import ResultFuture
    from hiddenstate.serve.session_operations import Push
    from hiddenstate.serve.stores import Claim, Row

    watch = SetBackWatch()
    watch.compare("a", Claim(1, 1, Row(7, 7, 0.0, 0.0, "", None), strayed=True), KnownSession(2, 7))
    push = Push("a", ResultFuture(1), torch.zeros(3), steps=1, single_step=True, seq=None)
    with pytest.raises(SequenceGap, match=r"had come to input 7, and has come to 7 since, by other inputs.*are taken"):
        watch.tell(push, SessionEntry("a", 1, 1, seq=7))


def test_what_is_remembered_is_bounded(tmp_path):
    from hiddenstate.serve.arena import SessionEntry
    from hiddenstate.state import State

    arena, watch = Arena(State({"h": torch.zeros(1, 1)}), 2), SetBackWatch()
    for number in range(100):
        arena.enter(SessionEntry(f"{number}", 1, 1))
        watch.forgotten(f"{number}", arena)
        arena.drop(f"{number}")
    assert watch.known("99", None) == KnownSession(1, 0)
    assert sum(watch.known(f"{number}", None) is not None for number in range(100)) < 12
