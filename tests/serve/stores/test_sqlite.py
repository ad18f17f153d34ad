"""What only the SQLite store does: it remembers where sessions are in the file."""

import os
import shutil
import sqlite3
import subprocess
import sys
from contextlib import ExitStack

import httpx
import pytest
import torch

from hiddenstate.errors import SequenceGap, SessionExists, SessionLost, StoreFailed
from hiddenstate.serve import Client, Engine
from hiddenstate.serve.stores import Change, open_store
from hiddenstate.serve.stores.sqlite import SqliteStore
from hiddenstate.testing.check_store import moved_on
from tests.support.models import Deep
from tests.support.stores import begin, claimed, row
from tests.support.web import ROOT, serving


def test_a_session_made_anew_by_somebody_else_is_not_taken_for_the_old_one(tmp_path):
    """A store remembers where sessions lie in the file; another one on the same file may have changed that."""
    mine, theirs = (open_store(f"sqlite:///{tmp_path}/sessions.db") for _ in range(2))
    begin(mine, "a", "b", state=None)
    old = {name: claimed(mine, name).token for name in "ab"}
    theirs.commit([Change("a", claimed(theirs, "a").token, None, None, True)])
    begin(theirs, "a", state=None)
    group = moved_on(["a", "b"], [old["a"], old["b"]], {"a": 0, "b": 0}, 2)
    first, second = mine.advance([group], [])
    assert first is None
    assert second is not None
    assert mine.read("a") == row(state=None)
    assert [mine.answer("a", seq) for seq in (1, 2)] == [None, None]
    assert mine.answer("b", 2) == group.answers.sealed()[3]
    assert mine.others_wrote()
    assert mine.advance([moved_on(["a"], [claimed(mine, "a").token], {"a": 0}, 1)], []) != [None]
    assert theirs.answer("a", 1) is not None
    for store in (mine, theirs):
        store.close()


def test_more_sessions_than_are_remembered(tmp_path, monkeypatch):
    from hiddenstate.serve.stores import sqlite

    monkeypatch.setattr(sqlite, "_REMEMBERED", 3)
    store = open_store(f"sqlite:///{tmp_path}/sessions.db")
    names = [f"{n}" for n in range(8)]
    begin(store, *names, state=None)
    tokens = [found.token for found in store.claim([(name, -1) for name in names])]
    group = moved_on(names, tokens, dict.fromkeys(names, 0), 1)
    assert None not in store.advance([group], [])
    assert [store.answer(name, 1) for name in names] == group.answers.sealed()
    assert [store.read(name).state for name in names] == group.states.sealed()
    store.close()


def test_one_damaged_answer_or_row_fails_its_own_input_alone(tmp_path):
    path, names, x = tmp_path / "sessions.db", [f"{n}" for n in range(40)], torch.zeros(40, 3)
    with Engine(Deep(), f"sqlite:///{path}") as engine:
        for name in names:
            engine.open(name)
        first = engine.push_many(names, x, seqs=[1] * 40)
        with sqlite3.connect(path) as other:
            other.execute("UPDATE answers SET data = x'00112233' WHERE place & 0xffffff = 3")
            other.execute("UPDATE sessions SET seq = 'many' WHERE id = '7'")
        other.close()
        again = engine.push_many(names, x, seqs=[1] * 40, errors="return")
        failed = {name: answer for name, answer in zip(names, again, strict=True) if isinstance(answer, Exception)}
        assert sorted(failed) == ["2", "7"]
        with pytest.raises(SequenceGap, match=r"was applied already .* its answer is damaged in the store"):
            raise failed["2"]
        with pytest.raises(SessionLost, match="session '7' is lost: its row is damaged") as lost:
            raise failed["7"]
        assert lost.value.reason == "damaged"
        assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True) if isinstance(b, torch.Tensor))
        assert engine.push("2", x[0], 2).shape == (2,)  # the session itself is as it was


COLUMNS = ["version", "seq", "steps", "opened", "touched", "fingerprint"]


@pytest.mark.parametrize("column", COLUMNS)
def test_a_session_whose_row_is_damaged_can_be_closed_begun_anew_and_imported(tmp_path, column, caplog):
    path, x = tmp_path / "sessions.db", torch.zeros(3)
    with Engine(Deep(), f"sqlite:///{path}", ttl=1000.0) as engine:
        for name in "abcd":
            engine.open(name)
            engine.push(name, x)
        with sqlite3.connect(path) as other:
            other.execute(f"UPDATE sessions SET {column} = x'00ff' WHERE id != 'a'")
        other.close()
        lost = (
            r"session 'b' is lost: its row is damaged\. Put it back with an exported state \(import\), or begin it anew"
        )
        asks = [engine.info, engine.export, engine.reset, lambda name: engine.push(name, x), lambda n: engine.fork(n)]
        for ask in (*asks, lambda name: engine.open(name, exist_ok=True)):
            with pytest.raises(SessionLost, match=lost):
                ask("b")
        assert engine.save(tmp_path / "savepoint.db") == 1
        for name in "bcd":
            assert f"left out of what is saved or loaded: session {name!r} is lost" in caplog.text
        with pytest.raises(SessionExists, match=r"1 of the 1 sessions in .* exist already"):
            engine.load(tmp_path / "savepoint.db")
        engine.close("b")
        engine.open("c")
        engine.import_("d", engine.export("a"))
        assert engine.sessions() == ["a", "c", "d"]
        assert [engine.info(name).seq for name in "acd"] == [1, 0, 1]
        for name in "acd":
            engine.push(name, x)


@pytest.mark.parametrize("column", COLUMNS)
def test_a_savepoint_is_loaded_over_damaged_rows_and_names_its_own(tmp_path, column, caplog):
    with Engine(Deep(), f"sqlite:///{tmp_path}/sessions.db", ttl=1000.0) as engine:
        for name in "ab":
            engine.open(name)
        for file in ("one.db", "other.db"):
            engine.save(tmp_path / file)
        for file, where in {"sessions.db": "id = 'a'", "other.db": "id = 'b'"}.items():
            with sqlite3.connect(tmp_path / file) as other:
                other.execute(f"UPDATE sessions SET {column} = x'7a7a' WHERE {where}")
            other.close()
        assert engine.load(tmp_path / "one.db", replace=True) == 2
        assert engine.load(tmp_path / "other.db", replace=True) == 1
        assert "left out of what is saved or loaded: session 'b'" in caplog.text
        assert [engine.info(name).seq for name in "ab"] == [0, 0]


def test_a_sweep_goes_round_a_row_that_is_damaged(tmp_path):
    store = open_store(f"sqlite:///{tmp_path}/sessions.db")
    begin(store, "a", "b", "c", state=None)
    with sqlite3.connect(tmp_path / "sessions.db") as other:
        other.execute("UPDATE sessions SET touched = 'zz' WHERE id = 'a'")
    other.close()
    assert store.sweep(1e9, 10) == 2
    assert store.sessions("", "", 10) == ["a"]
    store.close()


# Writes one session again and again, and ends as if the power had gone.
_WRITER = """
import os, sys
from hiddenstate.errors import StoreFailed
from hiddenstate.serve.stores import Change, Row
from hiddenstate.serve.stores.sqlite import SqliteStore

store, patient, count, fill = SqliteStore(sys.argv[1]), sys.argv[2] == "patient", int(sys.argv[3]), sys.argv[4:]
def row(seq): return Row(seq, seq, 1.0, 1.0, "model", bytes([seq % 251]) * 100_000)
(token,) = store.commit([Change("a", None, row(0))])
done = 0
for seq in range(1, count + 1):
    if fill and seq == count // 2:
        with open(fill[0], "wb", buffering=0) as junk:
            try:
                while True: junk.write(bytes(4096))
            except OSError: pass
    try:
        (token,) = store.commit([Change("a", token, row(seq), b"answer")])
        done = seq
    except StoreFailed:
        pass
print(done, flush=True)
os._exit(9)
"""


def written(*arguments: object) -> int:
    """The last input that was acknowledged by a process that was then killed."""
    environment = {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}"}
    line = [sys.executable, "-c", _WRITER, *map(str, arguments)]
    ran = subprocess.run(line, env=environment, capture_output=True, text=True, timeout=120)
    assert ran.returncode == 9, ran.stderr
    return int(ran.stdout)


@pytest.mark.slow
def test_the_log_never_fills_a_small_disk(small_disk):
    """Three hundred changes of 100 KB are 30 MB of log, if it is never copied back."""
    assert written(small_disk / "sessions.db", "patient", 300) == 300
    store = SqliteStore(str(small_disk / "sessions.db"))
    assert store.read("a").seq == 300
    store.close()


@pytest.mark.slow
def test_a_full_disk_is_no_reason_not_to_start_again(small_disk):
    """Somebody else fills the disk, and the process is killed while its log has not been copied back."""
    junk = small_disk / "junk"
    last = written(small_disk / "sessions.db", "patient", 40, junk)
    store = SqliteStore(str(small_disk / "sessions.db"))
    found = store.read("a")
    assert (found.seq, found.state) == (last, bytes([last % 251]) * 100_000)
    (claim,) = store.claim([("a", -1)])
    junk.unlink()
    assert store.commit([Change("a", claim.token, row(last + 1))]) != [None]
    store.close()


@pytest.mark.slow
@pytest.mark.parametrize("ways", ["one session", "many sessions"])
def test_a_server_on_a_disk_that_it_fills_goes_on_when_sessions_are_closed(small_disk, ways):
    """New sessions are refused at last, not the end of those there are; and nothing waits for a restart."""
    path = f"{small_disk}/sessions.db"
    model = torch.nn.LSTM(3, 512, batch_first=True)
    (small_disk / "others").write_bytes(bytes(5 * 2**20))
    with ExitStack() as stack:
        engine = stack.enter_context(Engine(model, f"sqlite:///{path}"))
        url = stack.enter_context(serving(engine))
        client = stack.enter_context(Client(url))
        web = stack.enter_context(httpx.Client(base_url=url, trust_env=False))
        applied: dict[str, int] = {}
        for number in range(1 if ways == "one session" else 500):
            answer = web.put(f"/v1/sessions/{number}")
            for seq in range(100 if ways == "one session" else 3):
                if answer.status_code == 503:
                    break
                applied[f"{number}"] = seq
                answer = web.post(f"/v1/sessions/{number}/steps", json={"x": [1.0, 2.0, 3.0]})
                applied[f"{number}"] += answer.status_code == 200
            log, free = os.stat(f"{path}-wal").st_size, shutil.disk_usage(small_disk).free
            assert log <= (free + log) / 4 + 2**20  # one tick beyond it at most
            if answer.status_code == 503:
                break
        if ways == "many sessions":
            assert "the disk is full" in answer.json()["error"]["message"]
        for name in list(applied)[: len(applied) // 3]:
            assert web.delete(f"/v1/sessions/{name}").status_code == 204
            del applied[name]
        assert web.get("/readyz").status_code == 200
        for name in list(applied)[:20]:
            assert client.push(name, torch.ones(3)).shape == (512,)
            applied[name] += 1
        assert {name: client.info(name).seq for name in applied} == applied
    with Engine(model, f"sqlite:///{path}") as engine:
        engine.check()
        (small_disk / "junk").write_bytes(bytes(shutil.disk_usage(small_disk).free - 2**16))
        with pytest.raises(StoreFailed, match=r"disk is full: of \d+ bytes, \d+ are needed for the log, and 1048576"):
            engine.check()
        assert {name: engine.info(name).seq for name in engine.sessions()} == applied
