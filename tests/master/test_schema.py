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
from rlmesh.master.state.schema import SchemaError, decode, encode
from rlmesh.master.state.snapshot import Snapshot
from rlmesh.master.state.store import (
    MIGRATED,
    OF_PICKLES,
    SCHEMA,
    STORE_FILE,
    Row,
    Store,
    Stored,
    StoreRefused,
    check_store,
)
from rlmesh.runtime.calling.peer_status import Serving
from tests.master.bench import Bench, job, role
from tests.master.test_node_loss import MEMBER, Nodes, spread

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


def two_nodes_in_trouble() -> Nodes:
    """A lost node without room elsewhere, a hang, a notice, a bad device and a failed call, all at once."""
    bench = Nodes(spread(role("REWARD", restart=MEMBER), nnodes=2, wait_s=60.0))
    bench.running()
    bench.manager.context.graph.observe("TRAINER:0", [EdgeStats("ACTOR:0", "f", 1, 0, 0.1, 0.1, 0.0, 5, 6)], 101.0)
    bench.send(ev.NoticeGiven("SIGUSR1", 30.0, 5.0))
    bench.send(ev.StepHeld("TRAINER", 0, 0, 7))
    stuck = MemberProgress(None, (Serving("f", 700.0, "TRAINER:0", True),), 700.0, ())
    bench.send(ev.ProgressSeen(("REWARD", 0, 0), stuck), 1.0)
    bench.send(ev.ProgressSeen(("TRAINER", 0, 0), None, "stopped"))
    bench.send(ev.DeviceFailed(1, "v9", "an Xid"))
    bench.lose(1)
    bench.fail("TRAINER:0", "ValueError: half of an emoji: \ud83d", from_call=True)
    return bench


def snapshot_of(bench: Bench) -> Snapshot:
    manager, orders = bench.manager, dict(enumerate(bench.actions, 1))
    return Snapshot(manager.context, manager.decisions, {"A:0.0/7": 3}, orders, [(1, 77, 99.0)])


def stored(bench: Bench) -> Stored:
    tables: dict[str, tuple[Row, ...]] = {}
    for (table, _), (_, make) in snapshot_of(bench).rows().items():
        tables[table] = (*tables.get(table, ()), make())
    return Stored(tables)


def restored(bench: Bench, state: Stored) -> Snapshot:
    return Snapshot.of_rows(state, bench.manager.context.spec, 500.0)


def manager_of(snapshot: Snapshot) -> JobManager:
    spec = snapshot.context.spec
    scheduler = Scheduler(spec, Site("00", "ipc:///tmp/s/master"))
    return JobManager(spec, scheduler, 500.0, context=snapshot.context, decisions=snapshot.decisions)


def replaced(state: Stored, table: str, change: Callable[[Row], Row]) -> Stored:
    return Stored({**state.tables, table: tuple(map(change, state.rows(table)))})


@pytest.mark.case("a02")
@pytest.mark.parametrize("lived", [lived_through, two_nodes_in_trouble])
def test_the_next_master_stands_where_the_last_one_stood(lived: Callable[[], Bench]) -> None:
    bench = lived()
    again = restored(bench, stored(bench))
    assert again == snapshot_of(bench)
    assert "\ud83d" in again.context.failures[0].message
    # And decides the same from there on.
    manager = manager_of(again)
    bench.now += 1.0
    assert manager.handle(ev.Tick(), bench.now) == bench.manager.handle(ev.Tick(), bench.now)
    assert manager.decisions == bench.manager.decisions


def test_decisions_have_no_state_outside_of_the_record() -> None:
    """Any other attribute would be forgotten when the master is started again."""
    manager = lived_through().manager
    given = {
        "JobManager": {
            "context", "decisions", "watcher", "_state", "_scheduler", "_ending", "_recoveries", "_losses", "_failures",
            "_health", "activity_of",
        },
        "JobState": {"context", "saved", "last_lines", "actions"},
        "Recoveries": {"_state", "_saved"},
        "ReplacementPlanner": {"_state", "_scheduler"},
        "NodeLosses": {"_state", "_saved", "_failover", "_placements", "_recoveries"},
        "FailureHandler": {"_state", "_context", "_failures", "_failover", "_placements", "_recoveries", "_ending"},
        "HealthWatch": {"_state", "_health", "_fail", "_diagnosis"},
        "DiagnosisManager": {"limit_s", "state"},
        "Ending": {"_state"},
        "FailoverCoordinator": {"_rules", "_sizes", "_fused"},
    }  # fmt: skip
    losses = manager._losses
    parts: list[Any] = [
        manager, manager._state, manager._recoveries, losses, losses._placements, losses._failover, manager._failures,
        manager._health, manager._health._diagnosis, manager._ending,
    ]  # fmt: skip
    for part in parts:
        attributes = set(getattr(part, "__dict__", {})) | set(getattr(type(part), "__slots__", ()))
        assert attributes == given.pop(type(part).__name__), f"{type(part).__name__}: DecisionState is for its state"
    assert not given


@pytest.fixture
def old_store(tmp_path: Path) -> Path:
    """The store of ``two_nodes_in_trouble``, as it was written before the decisions were one record."""
    path = tmp_path / STORE_FILE
    with closing(sqlite3.connect(path)) as db:
        db.executescript((Path(__file__).parent / "store_of_schema_2.sql").read_text())
    path.chmod(0o600)
    return path


@pytest.mark.case("a02")
def test_a_store_of_the_version_before_is_migrated_and_the_job_goes_on(old_store: Path) -> None:
    bench = two_nodes_in_trouble()
    check_store(old_store)
    assert last_graph(old_store.parent) == bench.manager.context.graph
    store = Store(old_store, "j1")
    migrated = restored(bench, store.read())
    assert migrated == snapshot_of(bench)
    store.write({key: make() for key, (_, make) in migrated.rows().items()})
    store.close()
    with closing(sqlite3.connect(old_store)) as db:
        assert db.execute("PRAGMA user_version").fetchone() == (SCHEMA,)
    store = Store(old_store, "j1")
    snapshot = restored(bench, store.read())
    store.close()
    assert snapshot == migrated
    bench.manager = manager_of(snapshot)
    bench.actions.clear()
    bench.reserved = 0
    bench.come(1)  # the lost node comes back: its members have room again
    assert not bench.manager.decisions.recoveries[0].unplaced
    bench.reserve()
    bench.exit("ACTOR:0", None, 9, incarnation=0)
    assert {member for action in bench.took(ev.Spawn) for member in action.members} == {
        ("ACTOR", 0), ("ACTOR", 1), ("REWARD", 0)
    }  # fmt: skip
    assert SCHEMA > MIGRATED > OF_PICKLES


def test_decisions_of_another_version_are_refused() -> None:
    bench = lived_through()
    for change, says in (
        (lambda record: record.update(version=99), "has version 99, not 3"),
        (lambda record: record.pop("version"), r"cannot be read: KeyError\('_losses'\)"),
        (lambda record: record.update(later=1), "DecisionState has unknown fields: later"),
    ):
        with pytest.raises(SchemaError, match=says):
            restored(bench, with_decisions(stored(bench), change))


def with_decisions(state: Stored, change: Callable[[dict[str, Any]], Any]) -> Stored:
    return replaced(state, "job", lambda row: (*row[:-1], changed(row[-1], change)) if row[0] == "decisions" else row)


def changed(data: object, change: Callable[[dict[str, Any]], Any]) -> str:
    record = json.loads(str(data))
    change(record)
    return json.dumps(record)


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
            restored(bench, forged)
    assert not (tmp_path / "owned").exists()


def edited(state: Stored, table: str, edit: Callable[[dict[str, Any]], None]) -> Stored:
    def change(row: Row) -> Row:
        return (*row[:-1], changed(row[-1], edit))

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
        (lambda record: record.update(placement=[1]), "Placement is not an object"),
    ],
)
def test_a_record_that_does_not_fit_its_schema_is_refused(edit: Callable[[Any], None], says: str) -> None:
    bench = lived_through()
    with pytest.raises(SchemaError, match=says):
        restored(bench, edited(stored(bench), "members", edit))


def test_unknown_facts_orders_and_decisions_are_refused() -> None:
    bench = lived_through()
    state = stored(bench)
    with pytest.raises(SchemaError, match="unknown facts about the job: later"):
        restored(bench, Stored({**state.tables, "job": (*state.rows("job"), ("later", "", "1"))}))
    with pytest.raises(SchemaError, match="an order of an unknown kind: 'Explode'"):
        restored(bench, Stored({**state.tables, "orders": ((1, "Explode", "{}"),)}))
    with pytest.raises(SchemaError, match="a row of str, int was expected"):
        restored(bench, Stored({**state.tables, "heard": (("A", "3"),)}))
    with pytest.raises(SchemaError, match="an array was expected"):
        restored(bench, with_decisions(state, lambda record: record.update(bad_devices={"v9": 1})))


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
