"""The file of a SQLite store from outside; `test_setback.py` has what an engine makes of it."""

import os
import sqlite3
from contextlib import closing

import pytest

from hiddenstate.errors import StoreFailed
from hiddenstate.serve.stores import open_store
from hiddenstate.serve.stores.sqlite_file import PAGE, WatchedFile, connect, copy_log_back


@pytest.fixture
def path(tmp_path):
    return tmp_path / "a.db"


def test_a_file_that_is_left_alone_is_the_same_also_when_its_log_is_copied_back(path):
    with closing(connect(str(path), patience=1.0)) as db:
        db.execute("CREATE TABLE a (b)")
        file = WatchedFile(str(path))
        db.execute("INSERT INTO a VALUES (1)")
        file.wrote()
        db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        file.copied_back()
        assert (file.moved(), file.overwritten(), file.torn(), file.size % PAGE) == (False, False, False, 0)
        os.utime(path)
        assert (file.overwritten(), file.overwritten()) == (True, False)


@pytest.mark.parametrize("left", ["-wal", "-shm"])
def test_another_file_is_no_good_as_long_as_anything_of_the_first_one_is_beside_it(path, left):
    with closing(connect(str(path), patience=1.0)) as db:
        db.execute("CREATE TABLE a (b)")
        file = WatchedFile(str(path))
        path.with_name("b.db").touch()
        os.replace(path.with_name("b.db"), path)
        os.remove(f"{path}{'-wal' if left == '-shm' else '-shm'}")
        with pytest.raises(StoreFailed, match="beside it is still the log of the one that was there before"):
            file.moved()
        os.remove(f"{path}{left}")
        assert file.moved()


def test_a_log_is_long_by_itself_or_for_the_room_that_there_is(path, monkeypatch):
    with closing(connect(str(path), patience=1.0)) as db:
        db.execute("CREATE TABLE a (b)")
        file = WatchedFile(str(path))
        assert not file.log_is_long(2**20)
        assert file.log_is_long(100)
        monkeypatch.setattr(WatchedFile, "free", lambda self: 1000)
        assert file.log_is_long(2**20)


def test_a_log_can_be_copied_back_alone(path):
    db = connect(str(path), patience=1.0)
    db.execute("CREATE TABLE a (b)")
    for end in ("", "-wal"):
        path.with_name(f"left.db{end}").write_bytes(path.with_name(f"a.db{end}").read_bytes())
    db.close()
    copy_log_back(str(path.with_name("left.db")))
    with closing(sqlite3.connect(path.with_name("left.db"))) as left:
        assert left.execute("SELECT count(*) FROM a").fetchone() == (0,)


def test_the_database_of_something_else_is_refused_and_left_as_it_was(path):
    with closing(sqlite3.connect(path)) as db:
        db.execute("CREATE TABLE bills (a)")
        db.commit()
    before = path.read_bytes()
    with pytest.raises(StoreFailed, match="it is the database of something else, with the tables bills"):
        open_store(f"sqlite:///{path}")
    assert path.read_bytes() == before
    assert not path.with_name("a.db-wal").exists()
