"""The job's state as data: what goes in comes out as it was, and nothing else comes in."""

from __future__ import annotations

import json
import pickle
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from rlmesh.errors import UsageError
from rlmesh.job.status import EdgeStats, ExitInfo, MemberProgress
from rlmesh.master import events as ev
from rlmesh.master.context import Member
from rlmesh.master.decisions.scheduler import Scheduler, Site
from rlmesh.master.job_manager import JobManager
from rlmesh.master.jobspec import RestartRule
from rlmesh.master.state.last_state import last_graph
from rlmesh.master.state.schema import KEPT, SchemaError, decode, encode, restore_part, state_of
from rlmesh.master.state.snapshot import restore, rows_of
from rlmesh.master.state.store import OF_PICKLES, SCHEMA, Row, Store, Stored, StoreRefused, check_store
from rlmesh.runtime.calling.peer_status import Serving
from tests.master.bench import Bench, job, role

RESTARTED = RestartRule("role", max_restarts=5)


def lived_through() -> Bench:
    """A job in the middle of things: a group that comes back, a driver that fails, a hang, a bad device, a notice."""
    bench = Bench(job(role("TRAINER"), role("ACTOR", 2, "elastic", restart=RESTARTED), role("REWARD", 2)))
    bench.running()
    manager = bench.manager
    manager.context.graph.observe("TRAINER:0", [EdgeStats("ACTOR:0", "f", 1, 0, 0.1, 0.1, 0.0, 5, 6)], 101.0)
    bench.exit("ACTOR:1", None, 9)
    bench.send(
        ev.ProgressSeen(("REWARD", 0, 0), MemberProgress(1.5, (Serving("f", 0.5, "TRAINER:0", True),), 2.0, ("A",)))
    )
    bench.send(ev.ProgressSeen(("REWARD", 1, 0), None))
    bench.send(ev.NoticeGiven("SIGUSR1", 30.0, 5.0))
    bench.send(ev.DeviceFailed(0, "v9", "an Xid"))
    bench.fail("TRAINER:0", "ValueError: half of an emoji: \ud83d", from_call=True)
    return bench


def stored(bench: Bench, masters: list[Row] | None = None) -> Stored:
    orders = dict(enumerate(bench.actions, 1))
    rows = rows_of(bench.manager, {"A:0.0/7": 3}, orders, masters or [(1, 77, 99.0)])
    tables: dict[str, tuple[Row, ...]] = {}
    for (table, _), (_, make) in rows.items():
        tables[table] = (*tables.get(table, ()), make())
    return Stored(tables)


def another(bench: Bench) -> JobManager:
    spec = bench.manager.context.spec
    return JobManager(spec, Scheduler(spec, Site("00", "ipc:///tmp/s/master")), 500.0)


def replaced(state: Stored, table: str, change: Callable[[Row], Row]) -> Stored:
    return Stored({**state.tables, table: tuple(map(change, state.rows(table)))})


@pytest.mark.case("a02")
def test_the_next_master_stands_where_the_last_one_stood() -> None:
    bench = lived_through()
    manager = another(bench)
    heard, orders, masters = restore(manager, stored(bench))
    assert state_of(manager) == state_of(bench.manager)
    assert heard == {"A:0.0/7": 3} and masters == [(1, 77, 99.0)]
    assert list(orders.values()) == bench.actions
    assert manager.context.members == bench.manager.context.members
    assert manager.context.graph == bench.manager.context.graph
    assert "\ud83d" in manager.context.failures[0].message
    bench.now += 1.0
    # And decides the same from there on.
    assert manager.handle(ev.Tick(), bench.now) == bench.manager.handle(ev.Tick(), bench.now)
    assert state_of(manager) == state_of(bench.manager)


def test_every_attribute_of_what_decides_is_kept_or_given() -> None:
    """An attribute that is in neither list would be forgotten when the master is started again."""
    given = {
        "JobManager": {"context", "_scheduler", "_ending", "_failover", "watcher"},
        "JobState": {"context", "last_lines", "actions"},
        "WaitDeadlines": {"_limits"},
        "StopTogether": set[str](),
        "Recoveries": {"_state"},
        "Moves": {"_state", "_scheduler"},
        "NodeLosses": {"_state", "_failover", "_moves", "_recoveries"},
        "Failing": {"_state", "_context", "_failover", "_moves", "_recoveries", "_ending", "_together"},
        "Failures": {"_settle_s", "_job"},
        "Watch": {"_state", "_fail"},
        "DiagnosisManager": {"limit_s"},
        "Ending": {"_state", "_together"},
        "FailoverCoordinator": {"_rules", "_sizes", "_fused"},
    }
    seen = set()

    def look(part: Any) -> None:
        name = type(part).__name__
        attributes = set(getattr(part, "__dict__", {})) | set(getattr(type(part), "__slots__", ()))
        kept = getattr(part, KEPT, {})
        assert attributes == {*kept, *given[name]}, f"{name}: add it to KEPT, or here if it is no state"
        seen.add(name)
        for inner, kind in kept.items():
            if hasattr(kind, KEPT):
                look(getattr(part, inner))

    manager = lived_through().manager
    look(manager)
    look(manager._ending)
    look(manager._failover)
    assert seen == set(given)


class Payload:
    """Unpickled, it makes a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.touch, (self.path,))


@pytest.mark.case("a02")
@pytest.mark.parametrize("table", ["job", "members", "nodes", "failures", "orders"])
def test_a_pickle_in_any_row_is_refused_and_not_loaded(table: str, tmp_path: Path) -> None:
    bench = lived_through()
    payload = pickle.dumps(Payload(tmp_path / "owned"))
    pickle.loads(payload)
    (tmp_path / "owned").unlink()  # it works where it is loaded
    for data in (payload, payload.decode("latin-1")):
        forged = replaced(stored(bench), table, lambda row, data=data: (*row[:-1], data))  # type: ignore[misc]
        with pytest.raises(SchemaError):
            restore(another(bench), forged)
    assert not (tmp_path / "owned").exists()


def edited(state: Stored, table: str, edit: Callable[[dict[str, Any]], None]) -> Stored:
    def change(row: Row) -> Row:
        record = json.loads(str(row[-1]))
        edit(record)
        return (*row[:-1], json.dumps(record))

    return replaced(state, table, change)


@pytest.mark.case("a02")
@pytest.mark.parametrize(
    ("edit", "says"),
    [
        (lambda record: record.update(shell="rm -rf"), "Member has unknown fields: shell"),
        (lambda record: record.pop("pid"), "Member lacks fields: pid"),
        (lambda record: record.update(pid="7"), "a whole number was expected, not '7'"),
        (lambda record: record.update(pid=True), "a whole number was expected, not True"),
        (lambda record: record.update(state="owned"), "one of starting, bound"),
        (lambda record: record.update(placement=[1]), "Placement is no object"),
    ],
)
def test_a_record_that_does_not_fit_its_schema_is_refused(edit: Callable[[Any], None], says: str) -> None:
    bench = lived_through()
    with pytest.raises(SchemaError, match=says):
        restore(another(bench), edited(stored(bench), "members", edit))


def test_unknown_facts_orders_and_decisions_are_refused() -> None:
    bench = lived_through()
    state = stored(bench)
    with pytest.raises(SchemaError, match="unknown facts about the job: later"):
        restore(another(bench), Stored({**state.tables, "job": (*state.rows("job"), ("later", "", "1"))}))
    with pytest.raises(SchemaError, match="an order of an unknown kind: 'Explode'"):
        restore(another(bench), Stored({**state.tables, "orders": ((1, "Explode", "{}"),)}))
    with pytest.raises(SchemaError, match="a row of str, int was expected"):
        restore(another(bench), Stored({**state.tables, "heard": (("A", "3"),)}))
    decisions = state_of(bench.manager)
    decisions["_moves"]["bad_devices"] = {"v9": 1}
    with pytest.raises(SchemaError, match="an array was expected"):
        restore_part(bench.manager, decisions)


def test_values_come_back_as_they_were() -> None:
    exit = ExitInfo("A", 0, 1, 7, None, 9, 1.5, last_log_lines=("\x1b[1m", "\ud83d"), oom="")
    assert decode(encode(exit, ExitInfo), ExitInfo) == exit
    assert encode(exit, ExitInfo).isascii()
    kind = dict[tuple[str, int], int | None]
    assert decode(encode({("A", 1): 3, ("B", 0): None}, kind), kind) == {("A", 1): 3, ("B", 0): None}
    action = ev.Action
    order = ev.Spawn(1, (("A", 0),))
    assert decode(encode(order, action), action) == order
    with pytest.raises(TypeError, match="has no form in the job's state"):
        encode(object(), object)
    deep = "[" * 100_000
    with pytest.raises(SchemaError, match="cannot be read"):
        decode(deep, list[int])
    assert decode(encode(float("inf"), float), float) == float("inf")
    assert Member.__name__ == "Member"


@pytest.mark.case("a02")
def test_a_store_of_pickles_is_refused_with_what_to_do(tmp_path: Path) -> None:
    path = tmp_path / "state.db"
    with closing(sqlite3.connect(path)) as db:
        db.execute("CREATE TABLE job (name, text, data)")
        db.execute("INSERT INTO job VALUES ('graph', '', ?)", (pickle.dumps(Payload(tmp_path / "owned")),))
        db.execute(f"PRAGMA user_version = {OF_PICKLES}")
        db.commit()
    path.chmod(0o600)
    for look in (lambda: check_store(path), lambda: Store(path, "job")):
        with pytest.raises(StoreRefused, match=rf"was written by rlmesh 0\.1 as pickles.*rm {path}\*.*--run-dir"):
            look()
    with pytest.raises(UsageError, match=r"was written by rlmesh 0\.1"):
        last_graph(tmp_path)
    assert not (tmp_path / "owned").exists()
    assert SCHEMA > OF_PICKLES
