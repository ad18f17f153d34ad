"""The file of a SQLite store from outside: whether the path still leads to what was opened, and how long its log is.

SQLite holds on to the files that it opened. One that is moved away, deleted or replaced by a backup goes on taking
commits that nobody will ever find again, so whoever acknowledges them has to look.
"""

from __future__ import annotations

import os
import shutil
import sqlite3
from contextlib import closing
from typing import NamedTuple

from ...errors import StoreFailed

PAGE = 16384  # bytes: a few states of some KiB each, so that a commit writes few pages and none runs over
_LOG_HEADER = 32  # bytes, by SQLite's file format; another one whenever the log begins anew


def connect(path: str, *, patience: float) -> sqlite3.Connection:
    """Open or create a database in WAL mode with full synchronization: a commit is on disk before it returns."""
    db = sqlite3.connect(path, timeout=patience, isolation_level=None, check_same_thread=False)
    try:
        _check_ours(db)
        db.execute(f"PRAGMA page_size = {PAGE}")  # takes effect only if the file is new
        db.execute("PRAGMA journal_mode = WAL")
        # Sessions change again and again: the longer the log, the more of it never has to be copied back. Never by
        # SQLite itself, in the midst of a commit: the store has to know who wrote to the file.
        db.execute("PRAGMA wal_autocheckpoint = 0")
        db.execute("PRAGMA cache_size = -32768")  # KiB: the pages of a tick or two
        db.execute("PRAGMA synchronous = FULL")
    except sqlite3.Error:
        db.close()
        raise
    return db


def _check_ours(db: sqlite3.Connection) -> None:
    """Raise for a database of something else, before anything in it is changed."""
    tables = {name for (name,) in db.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
    if tables and "sessions" not in tables:
        raise sqlite3.DatabaseError(
            f"it is the database of something else, with the tables {', '.join(sorted(tables))}"
        )


def copy_log_back(path: str) -> None:
    """Copy a log back alone: a full disk may have no room for the file that readers share, which this does without."""
    with closing(sqlite3.connect(path, isolation_level=None)) as db:
        db.execute("PRAGMA locking_mode = EXCLUSIVE")
        db.execute("PRAGMA wal_checkpoint(TRUNCATE)")


class _Identity(NamedTuple):
    device: int
    inode: int


class WatchedFile:
    """A database and its log, as they were when they were opened."""

    def __init__(self, path: str) -> None:
        """Watch what `path` leads to now."""
        self._path = path
        self.log = f"{os.path.realpath(path)}-wal"  # where SQLite has it, also behind a link
        self._index = f"{self.log[:-4]}-shm"  # what its users share of the log
        self._main, self._main_log, self._main_index = map(_identity, (path, self.log, self._index))
        self._written = self._last_written()
        self._began = self._log_began()

    def moved(self) -> bool:
        """Return whether another file has taken the place of the one that was opened; raise where none can be used."""
        now, log = _identity(self._path), _identity(self.log)
        if (now, log) == (self._main, self._main_log):
            return False
        if now is None:
            raise StoreFailed(
                f"the store {self._path} is gone: the file was deleted or moved away while it was served. Nothing was "
                f"acknowledged. Put it back, with the {os.path.basename(self.log)} that was beside it, or restore "
                f"another one there; to begin with an empty store, restart."
            )
        left = {log, _identity(self._index)} & {self._main_log, self._main_index} - {None}
        if now != self._main and left:
            raise StoreFailed(
                f"the store {self._path} was replaced by another file, but beside it is still the log of the one that "
                f"was there before, which would be taken for its own. Nothing was acknowledged. Remove {self.log} and "
                f"{self._index}, and the other file is served."
            )
        if now == self._main:
            raise StoreFailed(
                f"the log {self.log} was removed or replaced while it was in use, so what is in {self._path} is not "
                f"what was acknowledged. Nothing more is: restart, and what is in the file now is served."
            )
        return True

    def torn(self) -> bool:
        """Return whether the file that is there is the one that was opened, but its log is not."""
        return _identity(self._path) == self._main is not None and _identity(self.log) != self._main_log

    def overwritten(self) -> bool:
        """Return whether somebody has written to the file itself, and not by copying its log back, since last asked."""
        written = self._last_written()
        if written == self._written:
            return False
        began, self._written = self._log_began(), written
        before, self._began = self._began, began
        return before == began

    def wrote(self) -> None:
        """Note that something was written to the log from here: it is no longer empty."""
        self._began = self._began or self._log_began()

    def copied_back(self) -> None:
        """Note that the log was copied back from here."""
        self._written, self._began = self._last_written(), self._log_began()

    def log_is_long(self, most: int) -> bool:
        """Return whether the log has more than `most` bytes, or than a quarter of the room that there is for it."""
        try:
            log = os.stat(self.log).st_size
        except OSError:
            return False
        return log > min(most, (self.free() + log) // 4)

    def free(self) -> int:
        """Return the bytes that are left on the disk."""
        try:
            return shutil.disk_usage(os.path.dirname(self.log)).free
        except OSError:
            return 2**62

    @property
    def size(self) -> int:
        """The bytes of the file without its log."""
        return self._last_written()[1]

    def _last_written(self) -> tuple[int, int]:
        try:
            found = os.stat(self._path)
        except OSError:
            return 0, 0
        return found.st_mtime_ns, found.st_size

    def _log_began(self) -> bytes:
        # The log alone may be opened: closing a second descriptor of the file itself would drop all of SQLite's locks.
        try:
            with open(self.log, "rb") as log:
                return log.read(_LOG_HEADER)
        except OSError:
            return b""


def _identity(path: str) -> _Identity | None:
    try:
        found = os.stat(path)
    except OSError:
        return None
    return _Identity(found.st_dev, found.st_ino)
