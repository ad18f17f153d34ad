"""Sessions in one SQLite file: durable, for one worker; nothing else to install or run."""

from __future__ import annotations

import ctypes
import logging
import sqlite3
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

from ...errors import StoreBusy, StoreFailed
from .sqlite_file import PAGE, WatchedFile, connect, copy_log_back
from .store import RANDOM_BITS, Advance, Change, Claim, Lookup, Row, Store, damaged, next_version, strayed

_T = TypeVar("_T")
_log = logging.getLogger(__name__)

_SCHEMA = """
CREATE TABLE IF NOT EXISTS sessions (
    number INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT NOT NULL UNIQUE, version INTEGER NOT NULL,
    seq INTEGER NOT NULL, steps INTEGER NOT NULL, opened REAL NOT NULL, touched REAL NOT NULL,
    fingerprint TEXT NOT NULL, state BLOB
);
CREATE TABLE IF NOT EXISTS answers (place INTEGER PRIMARY KEY, seq INTEGER NOT NULL, data BLOB NOT NULL);
"""
# The key of an answer: those of one tick are neighbors, so that a commit writes few pages. Sessions' numbers are never
# used again, so no session can find the answer of another.
_PLACE = "((? << 40) | (SELECT number FROM sessions WHERE id = ?))"
_ANSWER = "INSERT OR REPLACE INTO answers (place, seq, data) VALUES (?, ?, ?)"
_FORGET = f"DELETE FROM answers WHERE place = {_PLACE}"
_ROW = "version, seq, steps, opened, touched, fingerprint, state"
_INSERT = (
    "INSERT OR IGNORE INTO sessions (version, seq, steps, opened, touched, fingerprint, state, id) "
    "VALUES (?, ?, ?, ?, ?, ?, ?, ?)"
)
_UPDATE = (
    "UPDATE sessions SET version = ?, seq = ?, steps = ?, opened = ?, touched = ?, fingerprint = ?, state = ? "
    "WHERE id = ? AND version = ?"
)
_MOVED = "version = ?, seq = ?, steps = ?, touched = ?, state = ?"
_ADVANCE = f"UPDATE sessions SET {_MOVED} WHERE number = ? AND version = ?"
_DELETE = "DELETE FROM sessions WHERE id = ? AND version = ?"
_HOLDS = "SELECT 1 FROM sessions WHERE id = ? AND version = ?"
_PLACES = 16  # answers to delete at least: an engine with another `replay` may have left more
_FORMAT = 1
_FULL = 13  # SQLite's code for a full disk; sqlite3 names it from Python 3.11 on
_LOG = 32 * 2**20  # bytes of the log at most, and a quarter of the room that there is on the disk
_RESERVE = 2**20  # bytes of the disk that are left for closing sessions, and for copying the log back
_INPUT = 8 * PAGE  # bytes that the file may grow by with one input
_REMEMBERED = 50_000  # sessions whose numbers are known without asking
_ASKED_AT_ONCE = 500  # SQLite takes no more than 999 parameters everywhere


class SqliteStore(Store):
    """Sessions in a file, in WAL mode with full synchronization: a commit survives a crash of process or machine.

    A second engine on the same file does no harm: each notices that the other wrote and reads again, and a change that
    comes too late finds another version and is made again. The log is copied back into the file when nobody waits for
    an answer (`upkeep`), and whenever there is no room for more of it.
    """

    chains = True
    _patient = True
    _damage: str | None = None  # of a file that took the place of the one that was opened

    def __init__(self, path: str, *, patience: float = 1.0) -> None:
        """Open or create the file; wait `patience` seconds for another process's lock before giving up."""
        self._path, self._patience = path, patience
        try:
            found = self._open()
        except sqlite3.Error as error:
            try:
                copy_log_back(path)
                found = self._open()
            except sqlite3.Error:
                raise StoreFailed(
                    f"{path} cannot be opened as a store of sessions: {error}. The folder must exist and be writable, "
                    f"the disk have room, and the file, where there is one, must have been made by this store."
                ) from error
        if found not in (0, _FORMAT):
            self._db.close()
            raise StoreFailed(
                f"{path} has version {found} of the format of sessions, but this library reads {_FORMAT}."
            )

    def _open(self) -> int:
        """Connect, and return the version of the file's format."""
        self._db = connect(self._path, patience=self._patience)
        try:
            self._db.executescript(_SCHEMA)
            (found,) = self._db.execute("PRAGMA user_version").fetchone()
            if not found:
                self._db.execute(f"PRAGMA user_version = {_FORMAT}")
            (self._count,) = self._db.execute("SELECT count(*) FROM sessions").fetchone()
            (self._seen,) = self._db.execute("PRAGMA data_version").fetchone()
        except sqlite3.Error:
            self._db.close()
            raise
        self._file = WatchedFile(self._path)
        self._numbers = Lookup()
        self._swept = 0  # the number of the last session that the sweep looked at
        self._patient = True
        return int(found)

    @property
    def patient(self) -> bool:
        """Whether a call waits for another process's lock."""
        return self._patient

    @patient.setter
    def patient(self, patient: bool) -> None:
        if patient != self._patient:
            self._patient = patient
            self._db.execute(f"PRAGMA busy_timeout = {round(1e3 * self._patience) if patient else 0}")

    def claim(self, wanted: Sequence[tuple[str, int]]) -> list[Claim | Any]:
        """Read the rows."""
        rows: dict[str, Claim] = {}
        names, known = [session for session, _ in wanted], dict(wanted)
        with self._failing("read"):
            for some in _chunks(names):
                query = f"SELECT id, number, {_ROW} FROM sessions WHERE id IN ({_marks(some)})"
                for session, number, version, *row in self._db.execute(query, some):
                    self._remember(session, number)
                    if [type(value) for value in (version, *row[:5])] == [int, int, int, float, float, str]:
                        rows[session] = Claim(version, version, Row(*row), strayed(known[session], version))
                    else:  # SQLite keeps what it is given, whatever the column
                        rows[session] = Claim(version, version, None, damage=damaged(session))
        return [rows.get(name) for name in names]

    def commit(self, changes: Sequence[Change]) -> list[int | None]:
        """Write everything in one transaction, on disk before this returns."""
        return self.advance([], changes)

    def advance(self, advances: Sequence[Advance], changes: Sequence[Change]) -> list[int | None]:
        """Write all changed rows in one transaction, those of a batch with one statement."""

        def write() -> tuple[list[int | None], list[int | None]]:
            with self._transaction():
                moved = [version for batch in advances for version in self._advance(batch)]
                applied = [self._apply(change) for change in changes]
                if advances or any(change.row is not None for change in changes):
                    self._check_room()
                return moved, applied

        with self._failing("write"):
            self._shorten_log()
            versions, applied = self._with_room(write)
            self._check_place()
        kept = [change for change, version in zip(changes, applied, strict=True) if version is not None]
        self._count += sum((change.token is None) - (change.row is None) for change in kept)
        return versions + applied

    def read(self, session: str) -> Row | None:
        """Read one row."""
        (found,) = self.claim([(session, -1)])
        if found is not None and found.damage is not None:
            raise found.damage
        return None if found is None else found.row

    def answer(self, session: str, seq: int) -> Any:
        """Read the place in which the answer to `seq` is kept, unless a later one has replaced it."""
        with self._failing("read"):
            query = f"SELECT data FROM answers WHERE place = {_PLACE} AND seq = ?"
            found = self._db.execute(query, (seq % max(1, self.replay), session, seq)).fetchone()
        return None if found is None else found[0]

    def sessions(self, prefix: str, after: str, limit: int) -> list[str]:
        """Read names along the index."""
        with self._failing("read"):
            query = "SELECT id FROM sessions WHERE id > ? AND id >= ? AND substr(id, 1, ?) = ? ORDER BY id LIMIT ?"
            return [name for (name,) in self._db.execute(query, (after, prefix, len(prefix), prefix, limit))]

    def count(self) -> int:
        """Return the number counted at the start and updated since."""
        return int(self._count)

    def sweep(self, before: float, limit: int) -> int:
        """Look at the next `limit` rows; calls go around the whole table."""
        with self._failing("sweep"), self._transaction():
            query = "SELECT number, id, touched FROM sessions WHERE number > ? ORDER BY number LIMIT ?"
            seen = self._db.execute(query, (self._swept, limit)).fetchall()
            gone = [session for _, session, touched in seen if isinstance(touched, int | float) and touched < before]
            if gone:
                self._numbers = Lookup()
                self._forget(gone)
                self._db.executemany("DELETE FROM sessions WHERE id = ?", [(session,) for session in gone])
        self._swept = seen[-1][0] if len(seen) == limit else 0
        self._count -= len(gone)
        return len(gone)

    def others_wrote(self) -> bool:
        """Ask SQLite for the number that changes with the commits of other connections, and look at the file itself.

        Where another file has taken its place, that one is opened.
        """
        with self._failing("read"):
            self._check_whole()
            (now,) = self._db.execute("PRAGMA data_version").fetchone()
            wrote, self._seen = now != self._seen, now
            overwritten = self._file.overwritten() and not wrote  # others who wrote may have copied the log back
            if replaced := self._file.moved() or overwritten:
                self._open_again()
            self._check_whole()
        self.replaced = replaced
        if wrote:
            self._numbers = Lookup()
        return wrote or replaced

    def check(self) -> None:
        """Begin to write, which fails where the file is locked or not the one that was opened, or the disk is full."""
        with self._failing("write"):
            self._check_whole()
            self._file.moved()
            self._shorten_log()

            def begin() -> None:
                with self._transaction():
                    self._db.execute("SELECT 1 FROM sessions LIMIT 1").fetchone()
                    self._check_room(more=_INPUT)

            self._with_room(begin)

    def upkeep(self) -> None:
        """Copy the log back into the file where it has become long."""
        if self._file.log_is_long(_LOG):
            with suppress(sqlite3.Error), self.timed():  # where somebody else reads or writes now, it is tried again
                self._copy_back()

    def close(self) -> None:
        """Close the file; SQLite then copies its log back into it."""
        if not self._file.torn():
            self._db.close()
            return
        # SQLite would copy the old log into what was put there. Before Python 3.12 one cannot say no: stay open.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._db))

    def _open_again(self) -> None:
        """Open what is under the path now: another file, or the same, to which somebody wrote past SQLite."""
        _log.warning("the file %s was replaced or overwritten; what is there now is served from here on", self._path)
        self._db.close()  # which leaves a file alone that is no longer in its place
        try:
            self._open()
            found = [line for (line,) in self._db.execute("PRAGMA quick_check(1)")]
            self._damage = None if found == ["ok"] else " ".join(found)
        except sqlite3.DatabaseError as error:
            self._damage = str(error)

    def _check_whole(self) -> None:
        if self._damage is not None:
            raise StoreFailed(
                f"the file {self._path} was replaced or overwritten while it is served, and it is damaged now: "
                f"{self._damage}. Nothing was acknowledged. Stop the server, put a whole copy there, remove the files "
                f"with -wal and -shm beside it, and start again."
            )

    def _check_place(self) -> None:
        """Raise where what was just written can no longer be found under the path."""
        self._file.wrote()
        if self._file.moved():
            raise StoreFailed(
                f"the store {self._path} was replaced at this moment. Nothing was acknowledged: repeat it."
            )

    def _advance(self, batch: Advance) -> list[int | None]:
        """Write the sessions of one batch; return their versions, None where a token is outdated."""
        numbers = self._numbers_of(batch.sessions)
        tokens, seqs, steps = (column.tolist() for column in (batch.tokens, batch.seqs, batch.steps))
        drawn = next_version() & ((1 << RANDOM_BITS) - 1)  # for all of them: sessions' versions are never compared
        versions: list[int | None] = [(((t >> RANDOM_BITS) + 1) << RANDOM_BITS) | drawn for t in tokens]
        touched = [batch.touched] * len(numbers)
        values = list(zip(versions, seqs, steps, touched, batch.states.sealed(), numbers, tokens, strict=True))
        self._db.execute("SAVEPOINT moves")  # all in one go, or else one by one to see which are outdated
        if self._db.executemany(_ADVANCE, values).rowcount != len(values):
            self._db.execute("ROLLBACK TO moves")
            versions = [value[0] if self._db.execute(_ADVANCE, value).rowcount else None for value in values]
        self._db.execute("RELEASE moves")
        if batch.answers is not None and self.replay:
            last, rows = (column.tolist() for column in batch.last(self.replay))
            answers = batch.answers.sealed()
            kept = [
                ((seq % self.replay << 40) | number, seq, answers[row])
                for number, its_seqs, its_rows, version in zip(numbers, last, rows, versions, strict=True)
                if version is not None
                for seq, row in zip(its_seqs, its_rows, strict=True)
            ]
            self._db.executemany(_ANSWER, kept)
        return versions

    def _numbers_of(self, sessions: list[str]) -> list[int]:
        """Return the number of each session, -1 where there is none."""
        found: list[int] = self._numbers.all(sessions).tolist()
        if -1 not in found:
            return found
        known: dict[str, int] = {}
        for some in _chunks(sessions):
            known.update(self._db.execute(f"SELECT id, number FROM sessions WHERE id IN ({_marks(some)})", some))
        for session, number in known.items():
            self._remember(session, number)
        return [known.get(session, -1) for session in sessions]

    def _remember(self, session: str, number: int) -> None:
        if self._numbers.names.get(session) != number:
            if len(self._numbers.names) >= _REMEMBERED:
                self._numbers = Lookup()
            self._numbers.add(session, number)

    def _forget(self, sessions: Sequence[str]) -> None:
        places = range(max(self.replay, _PLACES))
        self._db.executemany(_FORGET, [(place, session) for session in sessions for place in places])

    def _apply(self, change: Change) -> int | None:
        if change.token is not None and (change.anew or change.row is None):
            held = self._db.execute(_HOLDS, (change.session, change.token)).fetchone()
            if held is None:
                return None
            self._forget([change.session])
        if change.row is None or change.token is None:
            self._numbers.remove(change.session)
        if change.row is None:
            return 0 if self._db.execute(_DELETE, (change.session, change.token)).rowcount else None
        if change.token is None:
            version = next_version()
            done = self._db.execute(_INSERT, (version, *change.row, change.session)).rowcount
        else:
            version = next_version(change.token if isinstance(change.token, int) else 0)  # else the row is damaged
            done = self._db.execute(_UPDATE, (version, *change.row, change.session, change.token)).rowcount
        if done and self.replay and change.answer is not None:
            seq, (number,) = change.row.seq, self._numbers_of([change.session])
            self._db.execute(_ANSWER, ((seq % self.replay << 40) | number, seq, change.answer))
        return version if done else None

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        self._db.execute("BEGIN IMMEDIATE")
        try:
            yield
            self._db.execute("COMMIT")
        except BaseException:
            if self._db.in_transaction:
                self._db.execute("ROLLBACK")
            raise

    def _with_room(self, write: Callable[[], _T]) -> _T:
        """Write; where the disk is full, copy the log back into the file, which empties it, and write again."""
        try:
            return write()
        except sqlite3.OperationalError as error:
            if not self._patient or getattr(error, "sqlite_errorcode", _FULL) != _FULL:
                raise
            self._copy_back()
            return write()

    def _copy_back(self) -> None:
        self._db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        self._file.copied_back()

    def _shorten_log(self) -> None:
        """See to it, before more is written, that the log leaves room on the disk to be copied back."""
        if self._patient:
            self.upkeep()
        elif self._file.log_is_long(4 * _LOG):
            raise StoreBusy(f"the log of {self._path} has to be copied back first.")

    def _check_room(self, *, more: int = 0) -> None:
        """Raise, within a transaction, where the disk would not have room for what has to be copied back after it."""
        free = self._file.free()
        if free > 4 * _LOG:
            return
        pages, unused = (self._db.execute(f"PRAGMA {of}").fetchone()[0] for of in ("page_count", "freelist_count"))
        growth = max(0, more - unused * PAGE) + max(0, pages * PAGE - self._file.size)
        if free < growth + _RESERVE:  # as SQLite says it, and to be tried again after its log was copied back
            raise sqlite3.OperationalError(
                f"the disk is full: of {free} bytes, {growth} are needed for the log, and {_RESERVE} are left for "
                f"closing sessions"
            )

    @contextmanager
    def _failing(self, verb: str) -> Iterator[None]:
        try:
            with self.timed():
                yield
        except sqlite3.Error as error:
            if not self._patient and isinstance(error, sqlite3.OperationalError):
                raise StoreBusy(f"the store {self._path} cannot {verb} at this moment: {error}.") from error
            raise StoreFailed(
                f"the store {self._path} could not {verb}: {error}. Nothing was acknowledged; sessions are as they "
                f"were, and inputs may be repeated when the disk has room or the other user of the file has let go."
            ) from error


def _chunks(names: list[str]) -> Iterator[list[str]]:
    return (names[begin : begin + _ASKED_AT_ONCE] for begin in range(0, len(names), _ASKED_AT_ONCE))


def _marks(names: list[str]) -> str:
    return ", ".join("?" * len(names))
