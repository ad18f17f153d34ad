"""What only the SQLite store does: it remembers where sessions are in the file."""

from hiddenstate.serve.stores import Change, open_store
from tests.support.stores import begin, claimed, moved, row


def test_a_session_made_anew_by_somebody_else_is_not_taken_for_the_old_one(tmp_path):
    """A store remembers where sessions lie in the file; another one on the same file may have changed that."""
    mine, theirs = (open_store(f"sqlite:///{tmp_path}/sessions.db") for _ in range(2))
    begin(mine, "a", "b", state=None)
    old = {name: claimed(mine, name).token for name in "ab"}
    theirs.commit([Change("a", claimed(theirs, "a").token, None, None, True)])
    begin(theirs, "a", state=None)
    group = moved(["a", "b"], [old["a"], old["b"]], {"a": 0, "b": 0}, 2)
    first, second = mine.advance([group], [])
    assert first is None
    assert second is not None
    assert mine.read("a") == row(state=None)
    assert [mine.answer("a", seq) for seq in (1, 2)] == [None, None]
    assert mine.answer("b", 2) == group.answers.sealed()[3]
    assert mine.others_wrote()
    assert mine.advance([moved(["a"], [claimed(mine, "a").token], {"a": 0}, 1)], []) != [None]
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
    group = moved(names, tokens, dict.fromkeys(names, 0), 1)
    assert None not in store.advance([group], [])
    assert [store.answer(name, 1) for name in names] == group.answers.sealed()
    assert [store.read(name).state for name in names] == group.states.sealed()
    store.close()
