"""The job's state on disk: whole or not at all, readable, and never in the way of the job."""

from __future__ import annotations

import asyncio
import os
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from rlmesh.master.state import store as store_module
from rlmesh.master.state.filesystems import file_system_type, network_file_system
from rlmesh.master.state.persistence import RETRY_S, Persistence
from rlmesh.master.state.store import Row, Store, StoreError
from tests.own_time import HANG_S

HEARD = ("heard", ("A:0",))


def rows(**numbers: int) -> dict[tuple[str, tuple[object, ...]], tuple[object, Callable[[], Row]]]:
    def row(sender: str, number: int) -> Callable[[], Row]:
        return lambda: (sender, number)

    return {("heard", (sender,)): (number, row(sender, number)) for sender, number in numbers.items()}


def test_what_is_written_is_there_for_the_next_one(tmp_path: Path) -> None:
    path = tmp_path / "state.db"
    store = Store(path, "job-1")
    store.write({HEARD: ("A:0", 1), ("heard", ("B:0",)): ("B:0", 2)})
    store.write({HEARD: ("A:0", 7), ("heard", ("B:0",)): None})
    store.close()
    assert path.stat().st_mode & 0o777 == 0o600
    again = Store(path, "job-1")
    assert again.read().rows("heard") == (("A:0", 7),)
    again.close()
    other = Store(path, "job-2")
    assert other.read().rows("heard") == ()
    other.close()


def test_a_write_that_fails_leaves_nothing(tmp_path: Path) -> None:
    store = Store(tmp_path / "state.db", "job")
    with pytest.raises(StoreError, match=r"cannot be written to .*state\.db"):
        store.write({HEARD: ("A:0", 1), ("heard", ("B:0",)): ("B:0", 2, 3)})
    assert store.read().rows("heard") == ()
    store.write({HEARD: ("A:0", 1)})
    assert store.read().rows("heard") == (("A:0", 1),)
    store.close()


def test_the_journal_depends_on_the_file_system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert network_file_system(tmp_path) == ""
    assert file_system_type(Path("/proc")) == 0x9FA0
    store = Store(tmp_path / "local.db", "job")
    assert store.journal == "wal"
    store.close()
    monkeypatch.setattr(store_module, "network_file_system", lambda path: "NFS")
    store = Store(tmp_path / "nfs.db", "job")
    assert store.journal == "truncate"
    store.write({HEARD: ("A:0", 1)})
    assert not (tmp_path / "nfs.db-shm").exists()
    store.close()


KILLED_MASTER = """
import os, signal, sqlite3, sys
from pathlib import Path
from rlmesh.master.state import store as module

module.network_file_system = lambda path: "NFS"
store = module.Store(Path(sys.argv[1]), "job")
store.write({("job", ("samples_trained",)): ("samples_trained", "7", None)})
store._db.execute("PRAGMA cache_size = 1")  # so that changes are in the file before the commit
store._db.execute("BEGIN IMMEDIATE")
store._db.execute("UPDATE job SET text = '8'")
store._db.executemany("INSERT INTO heard VALUES (?, 1)", [(str(n) * 100,) for n in range(1000)])
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_facts_are_read_after_a_master_was_killed_in_the_middle_of_a_commit(tmp_path: Path) -> None:
    """On a network file system, where no log is beside the file: a resumed job would count its samples from zero."""
    path = tmp_path / "state.db"
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run([sys.executable, "-c", KILLED_MASTER, str(path)], env=env, timeout=HANG_S)
    assert done.returncode == -signal.SIGKILL and Path(f"{path}-journal").stat().st_size
    assert store_module.read_fact(path, "samples_trained") == "7"


async def test_a_master_waits_for_a_reader_that_stands_still(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the state of the master before it, it would start all members again."""
    monkeypatch.setattr(store_module, "BUSY_S", 0.05)
    path = tmp_path / "state.db"
    store = Store(path, "job")
    store.write({HEARD: ("A:0", 1)})
    store.close()
    with closing(sqlite3.connect(path, isolation_level=None)) as reader:
        reader.execute("PRAGMA locking_mode = EXCLUSIVE")
        reader.execute("BEGIN EXCLUSIVE")
        persistence = Persistence(path, "job")
        loading = asyncio.ensure_future(persistence.load())
        await asyncio.sleep(0.3)
        assert not loading.done()
    assert (await loading).rows("heard") == (("A:0", 1),)
    await persistence.close()


def test_a_newer_schema_is_refused_and_a_torn_file_is_set_aside(tmp_path: Path) -> None:
    path = tmp_path / "state.db"
    with closing(sqlite3.connect(path)) as db:
        db.execute("PRAGMA user_version = 99")
    with pytest.raises(StoreError, match="schema 99"):
        Store(path, "job")
    path.write_bytes(b"this is no database" * 100)
    store = Store(path, "job")
    assert store.read().rows("heard") == ()
    store.close()
    assert len(list(tmp_path.glob("state.broken-*"))) == 1


def tear(path: Path) -> None:
    for suffix in ("-wal", "-shm"):
        Path(f"{path}{suffix}").unlink(missing_ok=True)
    with path.open("r+b") as file:
        os.ftruncate(file.fileno(), 0)
        file.write(b"torn" * 5000)


async def test_only_changes_are_written(tmp_path: Path) -> None:
    persistence = Persistence(tmp_path / "state.db", "job")
    assert (await persistence.load()).rows("heard") == ()
    assert await persistence.save(rows(a=1, b=2))
    made: list[str] = []

    def make() -> Row:
        made.append("b")
        return ("b", 2)

    assert await persistence.save({**rows(c=1), ("heard", ("b",)): (2, make)})
    assert made == []
    await persistence.close()
    store = Store(tmp_path / "state.db", "job")
    assert store.read().rows("heard") == (("b", 2), ("c", 1))
    store.close()


async def test_a_full_disk_is_told_and_mended(tmp_path: Path) -> None:
    """A folder in place of the file cannot be opened, even by root; the job goes on and is saved when it can be."""
    now = 100.0
    path = tmp_path / "state.db"
    path.mkdir()
    persistence = Persistence(path, "job", clock=lambda: now)
    assert (await persistence.load()).tables == {}
    assert not await persistence.save(rows(a=1))
    assert str(path) in persistence.trouble
    path.rmdir()
    assert not await persistence.save(rows(a=2, b=1))  # too early
    now += RETRY_S
    assert await persistence.save(rows(b=2))
    assert persistence.trouble == ""
    await persistence.close()
    store = Store(path, "job")
    assert store.read().rows("heard") == (("b", 2),)
    store.close()


async def test_a_file_that_is_torn_while_the_job_runs_is_made_anew(tmp_path: Path) -> None:
    now = 0.0
    path = tmp_path / "state.db"
    persistence = Persistence(path, "job", clock=lambda: now)
    assert await persistence.save(rows(a=1, b=1))
    tear(path)
    for _ in range(3):
        now += RETRY_S
        await persistence.save(rows(a=2, b=1))
        await asyncio.sleep(0)
    assert persistence.trouble == ""
    await persistence.close()
    store = Store(path, "job")
    found = store.read().rows("heard")
    store.close()
    assert sorted(map(str, found)) == ["('a', 2)", "('b', 1)"]
