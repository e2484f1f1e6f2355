"""Reads the call graph from the store of a job without a running master."""

from __future__ import annotations

import sqlite3
from pathlib import Path

from rlmesh.errors import UsageError
from rlmesh.master.monitoring.graph import CallGraph
from rlmesh.master.state.schema import SchemaError, decode
from rlmesh.master.state.store import STORE_FILE, StoreRefused, check_store, reading

__all__ = ["last_graph"]


def last_graph(run_dir: Path) -> CallGraph:
    """Return the call graph that was saved last.

    Raises:
        UsageError: there is no graph, or the store may belong to another user, or is of another version.
    """
    path = run_dir / STORE_FILE
    try:
        check_store(path)
        # Read-only, so the journal is never replayed: this is for jobs that have ended.
        with reading(path) as db:
            row = db.execute("SELECT data FROM job WHERE name = 'graph'").fetchone()
        if row is None:
            raise UsageError(f"{path} has no graph of calls: the job ended before it had one")
        graph: CallGraph = decode(row[0], CallGraph)
    except StoreRefused as error:
        raise UsageError(str(error)) from None
    except (OSError, sqlite3.Error, SchemaError) as error:
        raise UsageError(f"the graph of calls of {run_dir} cannot be read from {path.name}: {error}") from error
    return graph
