"""What the store of a job says when no master is there any more to be asked. Reads only."""

from __future__ import annotations

import os
import pickle
import sqlite3
from contextlib import closing
from pathlib import Path

from rlmesh.errors import UsageError
from rlmesh.master.graph import CallGraph
from rlmesh.master.store import STORE_FILE

__all__ = ["last_graph"]


def last_graph(run_dir: Path) -> CallGraph:
    """The graph of calls as it was saved last.

    Raises:
        UsageError: there is none, or it may come from somebody else: it is a pickle, which can run code.
    """
    path = run_dir / STORE_FILE
    try:
        about = path.stat()
        if about.st_uid != os.getuid() or about.st_mode & 0o022:
            raise UsageError(
                f"the job's state in {path} is not read: it must belong to you (uid {os.getuid()}) and be writable by "
                f"you only, but belongs to uid {about.st_uid} with mode {about.st_mode & 0o777:04o}"
            )
        # Never the journal of a store that somebody writes: this is for jobs that have ended.
        with closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True)) as db:
            row = db.execute("SELECT data FROM job WHERE name = 'graph'").fetchone()
        graph = pickle.loads(row[0]) if row else None
    except (OSError, sqlite3.Error, pickle.UnpicklingError, AttributeError, ImportError) as error:
        raise UsageError(f"the graph of calls of {run_dir} cannot be read from {path.name}: {error}") from error
    if not isinstance(graph, CallGraph):
        raise UsageError(f"{path} has no graph of calls: the job ended before it had one")
    return graph
