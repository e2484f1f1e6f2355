"""Reading SQLite files whose writer may have been killed in the middle of a commit. Standard library only."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

__all__ = ["reading"]


@contextmanager
def reading(path: Path, wait_s: float) -> Iterator[sqlite3.Connection]:
    """Open a file read-only, after the rollback of a commit that its writer did not finish.

    Without a write-ahead log, a writer changes the file in place and has the old content in a journal. If it was
    killed meanwhile, a connection that may only read is refused, so another one rolls the commit back first.

    Args:
        path: the file.
        wait_s: seconds to wait for the locks of other processes.

    Raises:
        sqlite3.Error: the file cannot be read, or it needs a rollback and this user may not write to it.
    """
    where = path.absolute().as_uri()
    with closing(sqlite3.connect(f"{where}?mode=ro", uri=True, timeout=wait_s)) as db:
        try:
            db.execute("PRAGMA schema_version").fetchone()
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode != sqlite3.SQLITE_READONLY_ROLLBACK:
                raise
            with closing(sqlite3.connect(f"{where}?mode=rw", uri=True, timeout=wait_s)) as writer:
                writer.execute("PRAGMA schema_version").fetchone()
        yield db
