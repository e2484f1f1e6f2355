"""`Ledger`: the history of a run's sample buffer, in an SQLite file in the run directory.

::

    sqlite3 RUN/ledger.sqlite "SELECT position, step, oldest, newest FROM slots WHERE NOT void AND state = 'trained'"

Each row is a slot of the buffer (`rlmesh.rl.rollout.buffer`). When a run returns to a checkpoint, later rows are marked
as void, and new rows get the next ``line`` number. So the rows that are not void are the history of the present
weights; void rows are kept for people.

A thread writes all waiting rows in one transaction, without fsync: rows that are written survive the end of the
process, but perhaps not a crash of the machine. `Ledger.sync` calls fsync; each checkpoint does so for the rows before
it.
"""

from __future__ import annotations

import logging
import os
import queue
import sqlite3
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import closing
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, TypeVar

from rlmesh import sqlite_files
from rlmesh.errors import UsageError
from rlmesh.rl.rollout.buffer import GroupSlot

__all__ = ["LEDGER", "Ledger", "LedgerRow", "faults_of", "read_rows"]

logger = logging.getLogger(__name__)

LEDGER = "ledger.sqlite"
"""Name of the file in the run directory."""
WAIT_S = 60.0
"""Seconds to wait for the writing thread, and for the lock of a reader."""
PASSES = (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_IOERR, sqlite3.SQLITE_FULL)
"""Codes of errors that may be temporary, such as a full disk."""
PROMPTS = ("seed", "prompts", "data")
"""Settings that decide which prompt a position stands for."""
T = TypeVar("T")
Work = Callable[[sqlite3.Connection], Any]


def _sync(connection: sqlite3.Connection) -> None:
    """Mark a batch after which the thread calls fsync."""


TABLES = """
CREATE TABLE IF NOT EXISTS slots (
    line INTEGER, position INTEGER, epoch INTEGER, prompt INTEGER, state TEXT, step INTEGER, oldest INTEGER,
    newest INTEGER, asked INTEGER, deaths INTEGER, reason TEXT, at REAL, void INTEGER NOT NULL DEFAULT 0,
    PRIMARY KEY (line, position)
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS events (at REAL, line INTEGER, position INTEGER, step INTEGER, what TEXT);
CREATE TABLE IF NOT EXISTS settings (name TEXT PRIMARY KEY, value TEXT);
"""
PUT = """
INSERT INTO slots (line, position, epoch, prompt, state, step, oldest, newest, asked, deaths, reason, at)
VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)
ON CONFLICT (line, position) DO UPDATE SET state = excluded.state, step = excluded.step, oldest = excluded.oldest,
newest = excluded.newest, asked = excluded.asked, deaths = excluded.deaths, reason = excluded.reason, at = excluded.at
"""


@dataclass(frozen=True, slots=True)
class LedgerRow:
    """One row of the ledger; see `GroupSlot` for the columns that both have.

    Attributes:
        line: number of returns to a checkpoint before the row was written.
        oldest, newest: the oldest and newest version that sampled tokens of the group; None: no tokens.
        at: time of the last change, in seconds since 1970.
        void: True if the run returned to an earlier checkpoint.
    """

    line: int
    position: int
    epoch: int
    prompt: int
    state: str
    step: int | None
    oldest: int | None
    newest: int | None
    asked: int
    deaths: int
    reason: str
    at: float
    void: bool


COLUMNS = tuple(one.name for one in fields(LedgerRow))


class Ledger:
    """Writes the history. Methods may be called from any thread; `flush`, `go_back` and `troubles` wait for the file.

    Args:
        run_dir: the run directory. A new file gets the folder's permissions.
        settings: settings of the buffer, for readers of the file.
        clock: returns seconds since 1970.

    Raises:
        UsageError: the file cannot be opened.
    """

    def __init__(self, run_dir: Path, settings: Mapping[str, Any], clock: Callable[[], float]) -> None:
        self.path = run_dir / LEDGER
        self._clock = clock
        self._queue: queue.SimpleQueue[tuple[Work, Future[Any] | None] | None] = queue.SimpleQueue()
        self._error: Exception | None = None
        """An error of work without a future; the next wait raises it."""
        self._thread: threading.Thread | None = None
        self._line = 0
        self._left: list[tuple[Work, Future[Any] | None]] = []
        """Work that failed on a full disk, and is tried again."""
        self._told = False
        try:
            make_file(self.path)
            connection = sqlite3.connect(self.path, timeout=WAIT_S, isolation_level=None, check_same_thread=False)
            # A write-ahead log would need shared memory, which network file systems lack.
            connection.execute("PRAGMA journal_mode = TRUNCATE")
            connection.execute("PRAGMA synchronous = OFF")
            connection.executescript(TABLES)
            self._begin_history(connection, settings)
            connection.executemany(
                "INSERT OR REPLACE INTO settings VALUES (?, ?)",
                [(name, str(value)) for name, value in settings.items()],
            )
            self._line = connection.execute("SELECT coalesce(max(line), 0) FROM slots").fetchone()[0]
        except (OSError, sqlite3.Error) as error:
            raise UsageError(
                f"the ledger {self.path} cannot be opened: {error}. If it is damaged, move it away: a new one begins"
            ) from error
        self._thread = threading.Thread(target=self._write, args=(connection,), name="rlmesh-ledger", daemon=True)
        self._thread.start()

    def _begin_history(self, connection: sqlite3.Connection, settings: Mapping[str, Any]) -> None:
        """Store the first line with these prompts. If an earlier run had others, its positions are other prompts."""
        before = dict(connection.execute("SELECT name, value FROM settings"))
        if any(name in before and before[name] != str(settings.get(name)) for name in PROMPTS):
            first = connection.execute("SELECT coalesce(max(line), -1) + 1 FROM slots").fetchone()[0]
            connection.execute("INSERT OR REPLACE INTO settings VALUES ('first_line', ?)", (str(first),))

    def record(self, slot: GroupSlot) -> None:
        """Write the present state of a slot."""
        now, line = self._clock(), self._line
        oldest, newest = slot.versions or (None, None)
        row = (
            line, slot.position, *slot.key, slot.state, slot.step, oldest, newest, slot.asked, slot.deaths,
            slot.reason, now,
        )  # fmt: skip
        self._post(lambda connection: connection.execute(PUT, row))
        if slot.reason and slot.state in ("drawn", "failed"):
            verb = "failed" if slot.state == "failed" else "is asked for again"
            self.note(f"{verb}: {slot.reason}", position=slot.position, step=slot.step)

    def note(self, what: str, *, position: int | None = None, step: int | None = None) -> None:
        """Write an event, for people."""
        event = (self._clock(), self._line, position, step, what)
        self._post(lambda connection: connection.execute("INSERT INTO events VALUES (?, ?, ?, ?, ?)", event))

    def written(self) -> Future[None]:
        """A future that is done when all rows so far are written, without fsync."""
        future: Future[None] = Future()
        self._post(lambda connection: None, future)
        return future

    def flush(self, written: Future[None] | None = None) -> None:
        """Wait until rows are written, so that the end of this process does not lose them.

        If the disk is full or slow, return nevertheless: the rows are written later, and no checkpoint needs them.

        Args:
            written: a result of `written`, to wait for the rows before it; None: all rows so far.

        Raises:
            sqlite3.Error: the rows cannot be written for another reason.
        """
        try:
            self._result(written or self.written())
        except TimeoutError:
            logger.warning("%s is not written after %g s, and training goes on", self.path, WAIT_S)
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode & 0xFF not in PASSES:
                raise

    def sync(self) -> Future[None]:
        """Write all rows so far with fsync; returns a future that is done afterwards."""
        future: Future[None] = Future()
        self._post(_sync, future)
        return future

    def go_back(self, step: int, cursor: int, waiting: Iterable[int] = ()) -> None:
        """Mark the rows of later work as void, and begin the next line.

        Args:
            step: the last step that counts.
            cursor: the next position to draw.
            waiting: earlier positions whose slots are not finished.
        """
        undone = list(waiting)

        def work(connection: sqlite3.Connection) -> None:
            void = "UPDATE slots SET void = 1 WHERE NOT void AND position"
            changed = connection.execute(f"{void} >= ?", (cursor,)).rowcount
            changed += sum(connection.execute(f"{void} = ?", (position,)).rowcount for position in undone)
            self._line = connection.execute("SELECT coalesce(max(line), -1) + 1 FROM slots").fetchone()[0]
            if changed:
                event = (
                    self._clock(),
                    self._line,
                    None,
                    step,
                    f"the run goes on after this step: {changed} rows are void",
                )
                connection.execute("INSERT INTO events VALUES (?, ?, ?, ?, ?)", event)

        self._do(work)

    def troubles(self, sign: str) -> tuple[dict[int, int], dict[int, str]]:
        """Troubles of earlier lines with the same prompts, by position: the deaths of engines, for groups that were not
        sampled afterwards; and the reasons of failures that begin with ``sign``."""

        def work(connection: sqlite3.Connection) -> tuple[dict[int, int], dict[int, str]]:
            own = "line >= (SELECT coalesce(max(CAST(value AS INTEGER)), 0) FROM settings WHERE name = 'first_line')"
            last = f"SELECT position, deaths, state, max(line) FROM slots WHERE {own} GROUP BY position"
            deaths = f"SELECT position, deaths FROM ({last}) WHERE deaths > 0 AND state IN ('drawn', 'sampling')"
            reasons = f"SELECT position, reason FROM slots WHERE state = 'failed' AND {own} AND reason LIKE ? || '%'"
            return dict(connection.execute(deaths).fetchall()), dict(connection.execute(reasons, (sign,)).fetchall())

        return self._do(work)

    def close(self) -> None:
        """Write all waiting rows, and end the thread. May be called twice."""
        thread, self._thread = self._thread, None
        if thread is not None:
            self._queue.put(None)
            thread.join(WAIT_S)

    def _post(self, work: Work, future: Future[Any] | None = None) -> None:
        if self._thread is None:
            raise UsageError(f"the ledger {self.path} is closed")
        self._queue.put((work, future))

    def _do(self, work: Callable[[sqlite3.Connection], T]) -> T:
        future: Future[T] = Future()
        self._post(work, future)
        return self._result(future)

    def _result(self, future: Future[T]) -> T:
        result = future.result(WAIT_S)
        if self._error is not None:
            error, self._error = self._error, None
            raise error
        return result

    # On the thread that writes.

    def _write(self, connection: sqlite3.Connection) -> None:
        with closing(connection):
            ends = False
            while not ends:
                batch = [self._queue.get()]
                while not self._queue.empty():
                    batch.append(self._queue.get())
                ends = None in batch
                self._carry_out(connection, [one for one in batch if one is not None])

    def _carry_out(self, connection: sqlite3.Connection, batch: list[tuple[Work, Future[Any] | None]]) -> None:
        """Carry out the work of a batch, and earlier work that failed on a full disk, in one transaction.

        If the transaction fails, the futures of the batch get the error. Without futures, the next wait raises it. Work
        that failed on a full disk is kept for the next batch.
        """
        batch = self._left + batch
        results = []
        try:
            connection.execute("BEGIN IMMEDIATE")
            for work, future in batch:
                result = work(connection)
                if future is not None:
                    results.append((future, result))
            connection.execute("COMMIT")
        except Exception as error:
            if connection.in_transaction:
                connection.execute("ROLLBACK")
            passes = isinstance(error, sqlite3.OperationalError) and error.sqlite_errorcode & 0xFF in PASSES
            waiting = [(work, future) for work, future in batch if future is not None]
            self._left = [(work, None) for work, future in batch if passes and future is None]
            if passes and not self._told:
                self._told = True
                logger.warning("%s cannot be written, and training goes on: %s; it is tried again", self.path, error)
            for _, future in waiting:
                future.set_exception(error)
            if not passes and all(work is _sync for work, _ in waiting):  # nobody need look at these futures
                self._error = error
            return
        self._left = []
        fault = self._fsync() if any(work is _sync for work, _ in batch) else None
        syncs = {id(future) for work, future in batch if work is _sync}
        for future, result in results:
            if fault is not None and id(future) in syncs:
                future.set_exception(fault)
            else:
                future.set_result(result)

    def _fsync(self) -> OSError | None:
        """Call fsync on the file after a transaction; returns the error, if there is one."""
        try:
            with self.path.open("rb") as file:
                os.fsync(file.fileno())
        except OSError as error:
            return error
        return None


def make_file(path: Path) -> None:
    """Make the file if it does not exist: private, or readable for the group if the folder is. SQLite's other files get
    the same permissions."""
    mode = 0o600 | (path.parent.stat().st_mode & 0o040)
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, mode)
    try:
        found = os.fstat(fd)
        if found.st_uid not in (os.geteuid(), 0) or found.st_mode & 0o022:
            raise PermissionError(f"{path} belongs to another user, or others may write to it")
    finally:
        os.close(fd)


def read_rows(path: Path, *, void: bool = False) -> Iterator[LedgerRow]:
    """Read the rows of a ledger, by line and position; the run may be in progress.

    Args:
        path: the file.
        void: include rows that are void.
    """
    with sqlite_files.reading(path, WAIT_S) as connection:
        which = "" if void else "WHERE NOT void"
        for row in connection.execute(f"SELECT * FROM slots {which} ORDER BY line, position"):
            values: dict[str, Any] = dict(zip(COLUMNS, row, strict=True))
            values["void"] = bool(values["void"])
            yield LedgerRow(**values)


def faults_of(path: Path) -> list[str]:
    """Faults in the rows of a run that are not void, one sentence each; empty if the following is true.

    Each slot before a trained slot is trained, dropped or failed, so none is lost. No prompt is in two slots of an
    epoch. Steps follow each other without a gap, each with a whole batch, in drawing order. No group is staler than the
    pipeline allows, or was sampled by weights that did not exist yet.
    """
    with sqlite_files.reading(path, WAIT_S) as connection:
        settings = dict(connection.execute("SELECT name, value FROM settings"))
    batch_size, staleness = int(settings["batch_size"]), int(settings["staleness"])
    rows = sorted(read_rows(path), key=lambda row: row.position)
    trained = [row for row in rows if row.state == "trained"]
    last = max((row.position for row in trained), default=-1)
    found = [f"position {place} has {n} rows" for place, n in Counter(row.position for row in rows).items() if n > 1]
    there = {row.position for row in rows}
    found += [f"position {place} is lost" for place in range(last + 1) if place not in there]
    found += [
        f"position {row.position} is {row.state}, and later ones are trained"
        for row in rows
        if row.position <= last and row.state not in ("trained", "dropped", "failed")
    ]
    keys = Counter((row.epoch, row.prompt) for row in rows)
    found += [f"prompt {prompt} occurs {n} times in epoch {epoch}" for (epoch, prompt), n in keys.items() if n > 1]
    steps = [row.step or 0 for row in trained]
    if steps != sorted(steps):
        found.append("steps are not in drawing order")
    sizes = Counter(steps)
    found += [f"step {step} is missing" for step in range(1, max(sizes, default=0) + 1) if step not in sizes]
    found += [f"step {step} has {n} groups, not {batch_size}" for step, n in sizes.items() if n != batch_size]
    for row, step in zip(trained, steps, strict=True):
        if row.oldest is None or row.newest is None:
            found.append(f"position {row.position} has no version")
        elif step - 1 - row.oldest > staleness:
            found.append(f"position {row.position}, step {step}: version {row.oldest} is staler than {staleness}")
        elif row.newest > step - 1:
            found.append(f"position {row.position}, step {step}: version {row.newest} did not exist yet")
    return found
