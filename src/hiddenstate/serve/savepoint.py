"""Savepoints: all sessions with their kept answers in one file, to go back to or to take to another store.

The file is a store of its own, `sqlite:///path`: it can be looked into with any SQLite tool, and served as it is.
"""

from __future__ import annotations

import logging
import os
import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import closing
from itertools import takewhile
from pathlib import Path
from typing import Any, NamedTuple

from ..errors import BadInput, Overloaded, SessionExists, SessionLost, StoreFailed
from .model import ServedModel
from .stores import Busy, Change, Claim, Row, Store, open_store

_log = logging.getLogger(__name__)

_AT_ONCE = 256  # sessions that are written in one transaction
_UNFINISHED = "being loaded"  # in place of a model's fingerprint
_TRIES = 1000  # looks at a session that others change all the time


class SavedSession(NamedTuple):
    """A session with its last answers, oldest first: number of the input, and the answer as a file."""

    name: str
    row: Row
    answers: list[tuple[int, bytes]]


def save_sessions(store: Store, model: ServedModel, path: str | os.PathLike[str]) -> int:
    """Write all sessions of `store` to a file, which appears as a whole or not at all, and return how many there are.

    One whose row is damaged is left out, and named in the log.
    Each is taken between two of its inputs. Where nobody else writes to the store meanwhile, all at the same instant.
    """
    file = Path(path)
    part = file.with_name(f"{file.name}.{os.getpid()}.part")
    part.unlink(missing_ok=True)
    count = 0
    try:
        target = open_store(f"sqlite:///{part.absolute()}")
        try:
            target.replay = store.replay
            for some in _chunks(_sessions(store, model)):
                _write(target, some, [None] * len(some))
                count += len(some)
        finally:
            target.close()
        _note_replay(part, store.replay)
        with open(part, "rb") as written:
            os.fsync(written.fileno())
        _settle(file)
        os.replace(part, file)
    finally:
        for left in (part, Path(f"{part}-wal"), Path(f"{part}-shm")):
            left.unlink(missing_ok=True)
    return count


def load_sessions(
    path: str | os.PathLike[str], store: Store, model: ServedModel, *, replace: bool, max_stored: int
) -> list[str]:
    """Put all sessions of a file into `store`, and return their names.

    Those that exist already are an error before anything is written, or are replaced.
    """
    if not Path(path).is_file():
        raise BadInput(f"there is no savepoint {path}.")
    source = open_store(f"sqlite:///{Path(path).absolute()}")
    try:
        source.replay = _noted_replay(path, store.replay)
        names = list(_names(source))
        taken = [] if replace else [name for name in names if _is_there(store, name)]
        if taken:
            raise SessionExists(
                f"{len(taken)} of the {len(names)} sessions in {path} exist already, {taken[0]!r} among them, and "
                f"nothing was changed. Load it into an empty store, or with replace=True in place of those."
            )
        if store.count() + len(names) > max_stored and not replace:
            raise Overloaded(
                f"the store has {store.count()} sessions and {path} another {len(names)}, over {max_stored} in all. "
                f"Allow more: Engine(max_stored=...)."
            )
        loaded: list[str] = []
        for some in _chunks(_sessions(source, None)):
            fitting = [_as_kept(session, store, model) for session in some]
            _write(store, fitting, _tokens(store, [session.name for session in fitting]))
            loaded += [session.name for session in fitting]
        return loaded
    finally:
        source.close()


def _settle(file: Path) -> None:
    """Copy the log of a file that is about to be replaced back into it, or raise where somebody uses the file.

    A log that a killed process left beside it would be taken for that of the savepoint, and what is in it would win.
    """
    beside = [Path(f"{os.path.realpath(file)}{end}") for end in ("-wal", "-shm", "-journal")]
    if not any(left.exists() for left in beside):
        return
    why = "somebody uses it"
    try:
        with closing(sqlite3.connect(file, timeout=0, isolation_level=None)) as db:
            (mode,) = db.execute("PRAGMA journal_mode = DELETE").fetchone()  # which removes the log, if nobody uses it
            if mode == "delete" and not any(left.exists() for left in beside):
                return
    except sqlite3.Error as error:
        why = str(error)
    raise StoreFailed(
        f"the savepoint cannot take the place of {file}, beside which there is a log of its own ({beside[0].name}): "
        f"{why}. Nothing was changed. Save to another path, or stop whoever serves that file, or remove it together "
        f"with its log."
    )


def _note_replay(path: Path, replay: int) -> None:
    """Write into a file how many answers of each session are kept in it, without which they are not found."""
    with closing(sqlite3.connect(path)) as db, db:
        db.execute("CREATE TABLE savepoint (replay INTEGER NOT NULL)")
        db.execute("INSERT INTO savepoint VALUES (?)", (replay,))


def _noted_replay(path: str | os.PathLike[str], otherwise: int) -> int:
    with closing(sqlite3.connect(path)) as db:
        if db.execute("SELECT 1 FROM sqlite_master WHERE name = 'savepoint'").fetchone() is None:
            return otherwise  # the file of a store
        return int(db.execute("SELECT replay FROM savepoint").fetchone()[0])


def _is_there(store: Store, name: str) -> bool:
    try:
        return store.read(name) is not None
    except SessionLost:  # damaged, but there
        return True


def _names(store: Store) -> Iterator[str]:
    after = ""
    while names := store.sessions("", after, 1000):
        yield from names
        after = names[-1]


def _sessions(store: Store, model: ServedModel | None) -> Iterator[SavedSession]:
    """Yield all sessions, with states and answers as files; one that is damaged is left out, and named in the log."""
    for name in _names(store):
        for _ in range(_TRIES):
            try:
                row = store.read(name)
            except SessionLost as error:
                _log.warning("left out of what is saved or loaded: %s", error)
                break
            if row is None:
                break  # it was closed since it was listed
            found = [(seq, store.answer(name, seq)) for seq in range(row.seq, max(0, row.seq - store.replay), -1)]
            if store.read(name) == row:  # else another worker came between
                kept = [(seq, _as_file(answer)) for seq, answer in takewhile(lambda one: one[1] is not None, found)]
                if row.state is not None and not store.sealed:
                    assert model is not None
                    row = row._replace(state=model.format.seal(row.state))
                yield SavedSession(name, row, kept[::-1])
                break
        else:
            raise Overloaded(f"session {name!r} is being changed all the time, so it cannot be saved. Try again.")


def _as_file(answer: Any) -> bytes:
    """Return an answer as a file; the memory store keeps it as raw bytes and their format."""
    return answer if isinstance(answer, bytes) else answer[0].seal(answer[1])


def _as_kept(session: SavedSession, store: Store, model: ServedModel) -> SavedSession:
    """Return a session as `store` keeps it."""
    row = session.row
    if row.state is None or store.sealed:
        return session
    if not model.owns(row.fingerprint):
        raise SessionLost(
            f"session {session.name!r} belongs to another model ({row.fingerprint}) than the one served "
            f"({model.fingerprint}), and a store in memory holds only states of that one. Load it into another store.",
            "model",
        )
    source = f"the saved state of session {session.name!r}"
    return session._replace(row=row._replace(state=model.format.unseal(row.state, source=source)))


def _tokens(store: Store, names: Sequence[str]) -> list[int | None]:
    """Return what the store asks for to replace each session, None where there is none."""
    tokens: list[int | None] = []
    for name, claim in zip(names, store.claim([(name, -1) for name in names]), strict=True):
        if isinstance(claim, Busy):
            raise Overloaded(f"session {name!r} is in use by another worker, so it cannot be replaced. Try again.")
        if isinstance(claim, SessionLost):
            raise claim
        tokens.append(claim.token if isinstance(claim, Claim) else None)
    return tokens


def _write(store: Store, sessions: Sequence[SavedSession], tokens: list[int | None]) -> None:
    """Write sessions: their answers one after the other, as they came to be, and at last what they are.

    Until then they belong to no model, so that no other worker takes them for what they are not.
    """
    for turn in range(max([len(session.answers) for session in sessions], default=0)):
        changes: dict[int, Change] = {}
        for number, (name, row, answers) in enumerate(sessions):
            if turn < len(answers):
                seq, answer = answers[turn]
                unfinished = row._replace(seq=seq, fingerprint=_UNFINISHED, state=None)
                changes[number] = Change(name, tokens[number], unfinished, answer, anew=not turn)
        _commit(store, changes, tokens)
    whole = [
        Change(name, token, row, anew=not answers) for (name, row, answers), token in zip(sessions, tokens, strict=True)
    ]
    _commit(store, dict(enumerate(whole)), tokens)


def _commit(store: Store, changes: dict[int, Change], tokens: list[int | None]) -> None:
    """Make changes durable, and note the tokens for the next ones."""
    versions = store.commit(list(changes.values()))
    for (number, change), version in zip(changes.items(), versions, strict=True):
        if version is None:
            raise Overloaded(f"session {change.session!r} was changed by another worker meanwhile. Try again.")
        tokens[number] = version
    if store.shared:  # where a change ends the claim
        names = [change.session for change in changes.values()]
        for number, token in zip(changes, _tokens(store, names), strict=True):
            tokens[number] = token


def _chunks(sessions: Iterator[SavedSession]) -> Iterator[list[SavedSession]]:
    some: list[SavedSession] = []
    for session in sessions:
        some.append(session)
        if len(some) == _AT_ONCE:
            yield some
            some = []
    if some:
        yield some
