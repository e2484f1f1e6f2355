"""The state of a job in one SQLite file, so that a master that was killed can be started again where it was.

``<run_dir>/state.db`` has the job as ``JobContext`` knows it, one row for each thing that changes by itself: nodes,
members, failures, single facts about the job; besides, what decisions depend on, the orders that are not carried out
yet, and how much of each sender's news was taken in. Columns are for people and tools (``sqlite3 state.db``); what the
master reads back is the pickled value in ``data``. Like the run directory's other files it belongs to the user who
runs the job; it is made with mode 0600, since a pickle may not come from anybody else.

No commit waits for a disk. On a local file system the journal is a write-ahead log with ``synchronous=NORMAL``: a
commit appends to the page cache, which outlives any process, and only the log's checkpoints wait for the disk. A power
failure can take the last commits along, and takes the job's processes anyway; the file stays whole. On a network file
system, where the log's shared memory does not work, the journal is a file that is truncated at each commit, with
``synchronous=OFF``: the same promise as long as the machine runs; a file that a power failure tore is found by its
check, set aside and told of. All of it happens on the thread of :mod:`rlmesh.master.persistence`, never on the loop
that takes events.
"""

from __future__ import annotations

import logging
import os
import sqlite3
import time
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from rlmesh.errors import RLMeshError
from rlmesh.master.filesystems import network_file_system

logger = logging.getLogger(__name__)

STORE_FILE = "state.db"
"""Name of the file in the run directory."""
SCHEMA = 1
BUSY_S = 2.0
"""How long a commit waits for a reader that locks the file."""

_TABLES: Mapping[str, tuple[str, ...]] = {
    # Key columns first, and how many of them there are in KEYS.
    "job": ("name", "text", "data"),
    "nodes": ("node_rank", "name", "hostname", "agent_pid", "data"),
    "members": ("role", "rank", "incarnation", "node_rank", "pid", "state", "step", "since", "data"),
    "failures": ("number", "at", "role", "rank", "message", "data"),
    "heard": ("sender", "number"),
    "orders": ("number", "kind", "data"),
    "masters": ("number", "pid", "started_at"),
}
KEYS: Mapping[str, int] = {"members": 2}
"""Columns of a table's key; 1 unless it is named here."""

Key = tuple[str, tuple[object, ...]]
"""Table and values of its key columns."""
Row = tuple[object, ...]
"""Values of all columns, key first."""
Changes = Mapping[Key, Row | None]
"""What to write; None deletes."""


def read_fact(path: Path, name: str) -> str:
    """A fact about a job as the file has it for people; empty if there is none, or no file."""
    if not path.exists():
        return ""
    try:
        with closing(sqlite3.connect(path, timeout=BUSY_S)) as file:
            found = file.execute("SELECT text FROM job WHERE name = ?", (name,)).fetchone()
    except sqlite3.Error:
        return ""
    return str(found[0]) if found else ""


class StoreError(RLMeshError):
    """The store cannot be used as it is; says which file, why, and what to do."""


@dataclass(frozen=True, slots=True)
class Stored:
    """All rows by table."""

    tables: Mapping[str, tuple[Row, ...]]

    def rows(self, table: str) -> tuple[Row, ...]:
        return self.tables.get(table, ())


class Store:
    """One job's file. All methods belong to the thread that made it.

    Args:
        path: of the file; its folder exists.
        job_id: whose state it is. The state of another job in the same run directory is dropped.

    Raises:
        StoreError: it cannot be opened or made.
    """

    def __init__(self, path: Path, job_id: str) -> None:
        self.path = path
        self._job_id = job_id
        self.journal = ""
        self._db = self._open()

    def read(self) -> Stored:
        """What is there; empty tables in a new file.

        Raises:
            StoreError: it cannot be read.
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
        """Write all of it or nothing.

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
                if self._db.in_transaction:  # a full disk may have ended it already
                    self._db.execute("ROLLBACK")
                raise
        except sqlite3.Error as error:
            raise StoreError(f"the job's state cannot be written to {self.path}: {error}{_advice(error)}") from error

    def _apply(self, table: str, key: tuple[object, ...], row: Row | None) -> None:
        columns = _TABLES[table]
        if row is None:
            where = " AND ".join(f"{column} IS ?" for column in columns[: len(key)])
            self._db.execute(f"DELETE FROM {table} WHERE {where}", key)
        else:
            marks = ", ".join("?" * len(columns))
            self._db.execute(f"INSERT OR REPLACE INTO {table} ({', '.join(columns)}) VALUES ({marks})", row)

    def close(self) -> None:
        """Close it; the file stays."""
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
            os.close(os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
            network = network_file_system(self.path)
        except OSError as error:
            raise sqlite3.OperationalError(error.strerror or str(error)) from error
        db = sqlite3.connect(self.path, timeout=BUSY_S, isolation_level=None)
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
        except BaseException:
            db.close()
            raise
        return db

    def _prepare(self, db: sqlite3.Connection) -> None:
        (schema,) = db.execute("PRAGMA user_version").fetchone()
        if schema > SCHEMA:
            raise StoreError(
                f"{self.path} has schema {schema} and this version of rlmesh knows {SCHEMA}: it was written by a newer "
                "one. Use that version, or another run directory"
            )
        if schema == SCHEMA and db.execute("SELECT 1 FROM about WHERE job_id = ?", (self._job_id,)).fetchone():
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
        logger.error("%s is no usable store (%s); it is kept as %s and a new one is made", self.path, why, aside)
        for suffix in ("", "-wal", "-shm", "-journal"):
            try:
                os.rename(f"{self.path}{suffix}", f"{aside}{suffix}")
            except FileNotFoundError:
                pass
            except OSError as error:
                raise StoreError(f"{self.path} is no usable store ({why}) and cannot be moved: {error}") from error


def _advice(error: sqlite3.Error) -> str:
    text = str(error).lower()
    if "full" in text or "space" in text:
        return ". Make room there; it is tried again"
    if "readonly" in text or "permission" in text or "unable to open" in text:
        return ". Make the run directory writable, or name another one by --run-dir"
    return ""
