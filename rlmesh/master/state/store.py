"""The state of a job in one SQLite file, from which a restarted master continues.

``<run_dir>/state.db`` has one row for each thing that changes by itself: nodes, members, failures and single facts
about the job; also the state that decisions depend on, the orders that are not carried out yet, and the number of the
last message taken from each sender. Columns are for people and tools (``sqlite3 state.db``); the master reads back the
JSON in ``data``, whose schema :mod:`rlmesh.master.state.schema` checks. Nothing in it is code. The file has mode 0600;
the file, its journals and its folder must belong to this user and not be writable by others, which every reader checks
first.

No commit waits for a disk. On a local file system the journal is a write-ahead log with ``synchronous=NORMAL``: a
commit appends to the page cache, which outlives any process, and only checkpoints wait for the disk. A power failure
can lose the last commits, but it ends the job's processes too; the file stays whole. On a network file system, where
the log's shared memory does not work, the journal is a file that is truncated at each commit, with
``synchronous=OFF``: the same guarantee as long as the machine runs; a file corrupted by a power failure is detected,
set aside and logged. All of this happens on the thread of :mod:`rlmesh.master.state.persistence`, never on the event
loop.
"""

from __future__ import annotations

import logging
import os
import sqlite3
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from rlmesh import private_files, sqlite_files
from rlmesh.errors import RLMeshError
from rlmesh.master.state.filesystems import network_file_system

logger = logging.getLogger(__name__)

STORE_FILE = "state.db"
"""Name of the file in the run directory."""
SCHEMA = 3
"""Version of the stored state (:class:`rlmesh.master.state.snapshot.Snapshot`)."""
MIGRATED = 2
"""The previous version. It has the same tables, and the snapshot converts its records."""
OF_PICKLES = 1
"""Schema of version 0.1, which stored pickles; pickles can run code, so they are not read any more."""
BUSY_S = 2.0
"""Seconds that a commit waits for a reader that locks the file."""
JOURNALS = ("-wal", "-shm", "-journal")

_TABLES: Mapping[str, tuple[str, ...]] = {
    # Key columns first; KEYS has their number.
    "job": ("name", "text", "data"),
    "nodes": ("node_rank", "name", "hostname", "agent_pid", "data"),
    "members": ("role", "rank", "incarnation", "node_rank", "pid", "state", "step", "since", "data"),
    "failures": ("number", "at", "role", "rank", "message", "data"),
    "heard": ("sender", "number"),
    "orders": ("number", "kind", "data"),
    "masters": ("number", "pid", "started_at"),
}
KEYS: Mapping[str, int] = {"members": 2}
"""Number of key columns of a table; 1 unless it is listed here."""

Key = tuple[str, tuple[object, ...]]
"""Table and values of its key columns."""
Row = tuple[object, ...]
"""Values of all columns, key first."""
Changes = Mapping[Key, Row | None]
"""Rows to write; None deletes."""


class StoreError(RLMeshError):
    """The store cannot be used as it is; says which file, why, and what to do."""


class StoreRefused(StoreError):
    """The store may belong to another user, or is of another version: a job must not continue with it, nor without
    it."""


def check_store(path: Path) -> None:
    """Check that an existing store can be used by this version; a missing or corrupt store is accepted.

    Raises:
        StoreRefused: it cannot; says why and what to do.
    """
    try:
        with reading(path) as db:
            _check_schema(path, db)
    except (FileNotFoundError, sqlite3.Error):
        pass


@contextmanager
def reading(path: Path) -> Iterator[sqlite3.Connection]:
    """Open a store read-only, after a check that no other user can have put it there.

    Raises:
        StoreRefused: it may belong to another user.
        FileNotFoundError: there is no store.
        sqlite3.Error: it cannot be opened.
    """
    _check_files(path, os.O_RDONLY)
    with sqlite_files.reading(path, BUSY_S) as db:
        yield db


def read_fact(path: Path, name: str) -> str:
    """Return the readable text of a fact about a job; empty if there is no such fact or file.

    Raises:
        StoreRefused: the file may belong to another user.
    """
    try:
        with reading(path) as db:
            found = db.execute("SELECT text FROM job WHERE name = ?", (name,)).fetchone()
    except (FileNotFoundError, sqlite3.Error):
        return ""
    return str(found[0]) if found else ""


def _check_files(path: Path, flags: int) -> None:
    """Raise if the file or one of its journals, which SQLite replays into it, may belong to another user."""
    try:
        os.close(private_files.open_file(path, flags, secret=True))
        for suffix in JOURNALS:
            try:
                os.close(private_files.open_file(f"{path}{suffix}", flags & ~os.O_CREAT, secret=True))
            except FileNotFoundError:
                pass
    except private_files.UnsafeFile as error:
        raise StoreRefused(
            f"the job's state in {path} is not used, since somebody else may have changed it: {error}"
        ) from None


def _check_schema(path: Path, db: sqlite3.Connection) -> int:
    """Return the schema's number; 0 for a new file."""
    (schema,) = db.execute("PRAGMA user_version").fetchone()
    if schema == OF_PICKLES:
        raise StoreRefused(
            f"the job's state in {path} was written by rlmesh 0.1 as pickles, which can run code and are not read any "
            f"more. Remove it (rm {path}*), or name another folder by --run-dir. Checkpoints are kept: a job that is "
            "started in this folder again resumes from them"
        )
    if schema > SCHEMA:
        raise StoreRefused(
            f"{path} has schema {schema} and this version of rlmesh knows {SCHEMA}: it was written by a newer "
            "one. Use that version, or another run directory"
        )
    return int(schema)


@dataclass(frozen=True, slots=True)
class Stored:
    """All rows by table."""

    tables: Mapping[str, tuple[Row, ...]]

    def rows(self, table: str) -> tuple[Row, ...]:
        return self.tables.get(table, ())


class Store:
    """One job's file. All methods belong to the thread that made it.

    Args:
        path: path of the file; its folder exists.
        job_id: the job whose state it is. The state of another job in the same run directory is dropped.
        opening_s: seconds that opening waits for a reader that locks the file.

    Raises:
        StoreRefused: the file may belong to another user, or is of another version.
        StoreError: it cannot be opened or made.
    """

    def __init__(self, path: Path, job_id: str, opening_s: float = BUSY_S) -> None:
        self.path = path
        self._job_id = job_id
        self._opening_s = opening_s
        self.journal = ""
        self._db = self._open()

    def read(self) -> Stored:
        """Return all rows; no rows for a new file.

        Raises:
            StoreError: the file cannot be read.
        """
        try:
            return Stored(
                {
                    table: tuple(self._db.execute(f"SELECT {', '.join(columns)} FROM {table} ORDER BY rowid"))
                    for table, columns in _TABLES.items()
                }
            )
        except sqlite3.Error as error:
            raise StoreError(f"the job's state in {self.path} cannot be read: {error}") from error

    def write(self, changes: Changes) -> None:
        """Write all changes or none.

        Raises:
            StoreError: nothing was written; says why and what to do.
        """
        try:
            self._db.execute("BEGIN IMMEDIATE")
            try:
                for (table, key), row in changes.items():
                    self._apply(table, key, row)
                self._db.execute("COMMIT")
            except BaseException:
                if self._db.in_transaction:  # a full disk may have ended the transaction already
                    self._db.execute("ROLLBACK")
                raise
        except sqlite3.Error as error:
            raise StoreError(f"the job's state cannot be written to {self.path}: {error}{_advice(error)}") from error

    def _apply(self, table: str, key: tuple[object, ...], row: Row | None) -> None:
        columns = _TABLES[table]
        if row is None:
            where = " AND ".join(f"{column} IS ?" for column in columns[: len(key)])
            self._db.execute(f"DELETE FROM {table} WHERE {where}", tuple(map(_storable, key)))
        else:
            marks = ", ".join("?" * len(columns))
            values = tuple(map(_storable, row))
            self._db.execute(f"INSERT OR REPLACE INTO {table} ({', '.join(columns)}) VALUES ({marks})", values)

    def close(self) -> None:
        """Close the file."""
        try:
            self._db.close()
        except sqlite3.Error as error:
            logger.warning("%s was not closed properly: %s", self.path, error)

    # Opening

    def _open(self) -> sqlite3.Connection:
        try:
            return self._connect()
        except sqlite3.DatabaseError as error:
            # OperationalError (no space, no permission) says nothing about the file's content.
            if isinstance(error, sqlite3.OperationalError):
                raise StoreError(f"the job's state cannot be kept in {self.path}: {error}{_advice(error)}") from error
            self._set_aside(str(error))
        try:
            return self._connect()
        except sqlite3.Error as error:
            raise StoreError(f"the job's state cannot be kept in {self.path}: {error}{_advice(error)}") from error

    def _connect(self) -> sqlite3.Connection:
        try:
            _check_files(self.path, os.O_RDWR | os.O_CREAT)
            network = network_file_system(self.path)
        except OSError as error:
            raise sqlite3.OperationalError(error.strerror or str(error)) from error
        db = sqlite3.connect(self.path, timeout=self._opening_s, isolation_level=None)
        try:
            wanted, durable = ("truncate", "OFF") if network else ("wal", "NORMAL")
            (self.journal,) = db.execute(f"PRAGMA journal_mode={wanted}").fetchone()
            db.execute(f"PRAGMA synchronous={durable}")
            if network:
                logger.info("%s is on %s: journal mode %s", self.path, network, self.journal)
                (found,) = db.execute("PRAGMA quick_check(1)").fetchone()
                if found != "ok":
                    raise sqlite3.DatabaseError(found)
            self._prepare(db)
            db.execute(f"PRAGMA busy_timeout = {round(BUSY_S * 1000)}")
        except BaseException:
            db.close()
            raise
        return db

    def _prepare(self, db: sqlite3.Connection) -> None:
        schema = _check_schema(self.path, db)
        known = schema in (MIGRATED, SCHEMA)
        if known and db.execute("SELECT 1 FROM about WHERE job_id = ?", (self._job_id,)).fetchone():
            if schema == MIGRATED:  # from here on, older versions refuse the file
                db.execute(f"PRAGMA user_version = {SCHEMA}")
            return
        db.execute("BEGIN IMMEDIATE")
        for (table,) in db.execute("SELECT name FROM sqlite_master WHERE type = 'table'").fetchall():
            db.execute(f'DROP TABLE "{table}"')
        for table, columns in _TABLES.items():
            key = ", ".join(columns[: KEYS.get(table, 1)])
            db.execute(f"CREATE TABLE {table} ({', '.join(columns)}, PRIMARY KEY ({key}))")
        db.execute("CREATE TABLE about (job_id, made_at)")
        db.execute("INSERT INTO about VALUES (?, ?)", (self._job_id, time.time()))
        db.execute(f"PRAGMA user_version = {SCHEMA}")
        db.execute("COMMIT")

    def _set_aside(self, why: str) -> None:
        aside = self.path.with_suffix(f".broken-{int(time.time())}")
        logger.error("%s is not a usable store (%s); it is kept as %s and a new one is made", self.path, why, aside)
        for suffix in ("", *JOURNALS):
            try:
                os.rename(f"{self.path}{suffix}", f"{aside}{suffix}")
            except FileNotFoundError:
                pass
            except OSError as error:
                raise StoreError(f"{self.path} is not a usable store ({why}) and cannot be moved: {error}") from error


def _storable(value: object) -> object:
    """Escape text that UTF-8 cannot encode: the columns are for people, and ``data`` is ASCII."""
    if isinstance(value, str) and not value.isascii():
        return value.encode("utf-8", "backslashreplace").decode()
    return value


def _advice(error: sqlite3.Error) -> str:
    text = str(error).lower()
    if "full" in text or "space" in text:
        return ". Make room there; it is tried again"
    if "readonly" in text or "permission" in text or "unable to open" in text:
        return ". Make the run directory writable, or name another one by --run-dir"
    return ""
