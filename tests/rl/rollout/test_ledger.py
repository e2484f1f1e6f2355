"""`Ledger`: what it writes, returns to checkpoints, its rights, and the faults that it finds."""

from __future__ import annotations

import os
import signal
import sqlite3
import stat
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from rlmesh.errors import UsageError
from rlmesh.rl.rollout.buffer import SampleBuffer
from rlmesh.rl.rollout.ledger import LEDGER, Ledger, faults_of, read_rows
from tests.own_time import HANG_S
from tests.rl.rollout.fakes import group_of

SETTINGS = {"pipeline": "sync", "staleness": 0, "batch_size": 2, "samples": 2, "prompts": 4, "seed": 0}


def key_of(position: int) -> tuple[int, int]:
    return divmod(position, 4)


@pytest.fixture
def ledger(tmp_path: Path) -> Iterator[Ledger]:
    made = Ledger(tmp_path, SETTINGS, lambda: 5.0)
    yield made
    made.close()


def train(buffer: SampleBuffer, step: int, *, trains: bool = True) -> None:
    """One synchronous step."""
    buffer.advance(step - 1)
    for slot in buffer.draw(key_of):
        buffer.ask(slot)
        buffer.sampled(slot, group_of(slot.position, step - 1))
        buffer.scored(slot, group_of(slot.position, step - 1))
    assert buffer.take(step)
    if trains:
        buffer.trained(step)


def test_rows_of_a_step_are_written_while_the_trainer_goes_on(ledger: Ledger, tmp_path: Path) -> None:
    buffer = SampleBuffer(2, 0, 9, record=ledger.record)
    train(buffer, 1)
    written = ledger.written()
    assert written.result(HANG_S) is None
    held, goes_on = threading.Event(), threading.Event()

    def hold(connection: object) -> None:
        held.set()
        goes_on.wait(HANG_S)

    ledger._post(hold)
    try:
        assert held.wait(HANG_S)
        ledger.flush(written)  # does not wait for later work
        assert [row.state for row in read_rows(tmp_path / LEDGER)] == ["trained"] * 2
    finally:
        goes_on.set()


def test_slots_are_rows(ledger: Ledger, tmp_path: Path) -> None:
    buffer = SampleBuffer(2, 0, 9, record=ledger.record)
    train(buffer, 1)
    train(buffer, 2, trains=False)
    ledger.flush()
    rows = list(read_rows(tmp_path / LEDGER))
    assert [(r.position, r.epoch, r.prompt, r.state, r.step, r.oldest) for r in rows] == [
        (0, 0, 0, "trained", 1, 0), (1, 0, 1, "trained", 1, 0), (2, 0, 2, "sampled", 2, 1), (3, 0, 3, "sampled", 2, 1),
    ]  # fmt: skip
    assert faults_of(tmp_path / LEDGER) == []


def test_a_return_to_a_checkpoint_voids_later_rows(ledger: Ledger, tmp_path: Path) -> None:
    buffer = SampleBuffer(2, 0, 9, record=ledger.record)
    for step in (1, 2, 3):
        train(buffer, step)
    ledger.go_back(1, 2)
    buffer.restore({"cursor": 2, "step": 2, "slots": []})
    train(buffer, 2)
    ledger.flush()
    rows = list(read_rows(tmp_path / LEDGER, void=True))
    assert [(row.line, row.position) for row in rows if row.void] == [(0, 2), (0, 3), (0, 4), (0, 5)]
    assert [(row.line, row.position) for row in rows if not row.void] == [(0, 0), (0, 1), (1, 2), (1, 3)]
    assert faults_of(tmp_path / LEDGER) == []


def test_slots_that_wait_get_new_rows(ledger: Ledger, tmp_path: Path) -> None:
    buffer = SampleBuffer(2, 1, 9, record=ledger.record)
    train(buffer, 1)
    state = buffer.state()
    ledger.go_back(1, state["cursor"], [slot["position"] for slot in state["slots"]])
    buffer.restore(state)
    ledger.flush()
    rows = [(row.line, row.position, row.state, row.void) for row in read_rows(tmp_path / LEDGER, void=True)]
    assert rows == [
        (0, 0, "trained", False), (0, 1, "trained", False), (0, 2, "sampled", True), (0, 3, "sampled", True),
        (1, 2, "sampled", False), (1, 3, "sampled", False),
    ]  # fmt: skip


def test_prompts_that_kill_are_remembered(ledger: Ledger) -> None:
    buffer = SampleBuffer(2, 0, 9, record=ledger.record)
    buffer.advance(0)
    buffer.draw(key_of)
    first, second = buffer.waiting
    buffer.ask_again(second, "engine 0 died", died=True)
    buffer.fail(first, "poison: it kills", poison=True)
    ledger.go_back(0, 0)
    assert ledger.troubles("poison") == ({1: 1}, {0: "poison: it kills"})
    buffer.ask(second)
    buffer.sampled(second, group_of(1, 0))
    assert ledger.troubles("poison") == ({}, {0: "poison: it kills"}), "it has been sampled since"


@pytest.mark.parametrize(("changed", "known"), [({}, True), ({"samples": 4}, True), ({"seed": 1}, False)])
def test_prompts_that_kill_are_forgotten_with_other_prompts(
    tmp_path: Path, changed: dict[str, Any], known: bool
) -> None:
    """A run that ended before its first checkpoint: in the next one, the position may be another prompt."""
    for settings in (SETTINGS, SETTINGS | changed, SETTINGS | changed):
        made = Ledger(tmp_path, settings, lambda: 5.0)
        found = made.troubles("poison")
        made.go_back(0, 0)
        if settings is SETTINGS:
            buffer = SampleBuffer(2, 0, 9, record=made.record)
            buffer.advance(0)
            buffer.draw(key_of)
            buffer.fail(buffer.waiting[0], "poison: it kills", poison=True)
        made.close()
        if settings is not SETTINGS:
            assert found == ({}, {0: "poison: it kills"} if known else {})


def test_the_file_is_as_private_as_its_folder(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        for mode, expected in ((0o700, 0o600), (0o750, 0o640)):
            folder = tmp_path / f"{mode:o}"
            folder.mkdir(mode=mode)
            Ledger(folder, SETTINGS, lambda: 0.0).close()
            assert stat.S_IMODE((folder / LEDGER).stat().st_mode) == expected
    finally:
        os.umask(before)
    (tmp_path / LEDGER).symlink_to(tmp_path / "700" / LEDGER)
    with pytest.raises(UsageError, match="cannot be opened"):
        Ledger(tmp_path, SETTINGS, lambda: 0.0)


def test_a_damaged_file_is_told(tmp_path: Path) -> None:
    (tmp_path / LEDGER).write_bytes(b"not a database" * 100)
    (tmp_path / LEDGER).chmod(0o600)
    with pytest.raises(UsageError, match="move it away"):
        Ledger(tmp_path, SETTINGS, lambda: 0.0)


def test_an_error_of_the_thread_is_raised_by_the_next_wait(ledger: Ledger, tmp_path: Path) -> None:
    with sqlite3.connect(tmp_path / LEDGER) as other:
        other.execute("DROP TABLE slots")
    other.close()
    buffer = SampleBuffer(2, 0, 9, record=ledger.record)
    buffer.advance(0)
    buffer.draw(key_of)
    with pytest.raises(sqlite3.OperationalError, match="no such table"):
        for _ in range(2):
            ledger.flush()


def test_a_full_disk_delays_rows_and_stops_nobody(
    ledger: Ledger, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def limit(pages: int) -> Callable[[sqlite3.Connection], Any]:
        return lambda connection: connection.execute(f"PRAGMA max_page_count = {pages}").fetchall()

    ledger._do(limit(1))  # which means: as many as there are, so that the file cannot grow
    buffer = SampleBuffer(2, 0, 200, record=ledger.record)
    for step in range(1, 101):
        train(buffer, step)
        ledger.flush()
    assert len(list(read_rows(tmp_path / LEDGER))) < 200
    assert [record.message for record in caplog.records if "training goes on" in record.message] != []
    assert sum("training goes on" in record.message for record in caplog.records) == 1, "it is told once"
    ledger._left.insert(0, (limit(10_000), None))
    ledger.flush()
    assert len(list(read_rows(tmp_path / LEDGER))) == 200 and faults_of(tmp_path / LEDGER) == []


def test_rows_are_in_the_file_before_it_is_synced(
    ledger: Ledger, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[int] = []
    monkeypatch.setattr(os, "fsync", lambda number: found.append(len(list(read_rows(tmp_path / LEDGER)))))
    begins = threading.Event()
    ledger._post(lambda connection: begins.wait(HANG_S))  # so that rows and sync are one batch or later
    buffer = SampleBuffer(2, 0, 9, record=ledger.record)
    train(buffer, 1)
    done = ledger.sync()
    train(buffer, 2)
    begins.set()
    done.result(HANG_S)
    assert found and found[0] >= 2


def test_an_error_beside_a_sync_is_raised_by_the_next_wait(ledger: Ledger, tmp_path: Path) -> None:
    begins = threading.Event()
    ledger._post(lambda connection: begins.wait(HANG_S))
    ledger._post(lambda connection: connection.execute("INSERT INTO nowhere VALUES (1)"))
    done = ledger.sync()
    begins.set()
    with pytest.raises(sqlite3.OperationalError, match="no such table"):
        done.result(HANG_S)
    with pytest.raises(sqlite3.OperationalError, match="no such table"):
        ledger.flush()


def test_a_disk_that_cannot_be_synced_fails_the_sync_alone(ledger: Ledger, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(number: int) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "fsync", fails)
    with pytest.raises(OSError, match="Input/output error"):
        ledger.sync().result(HANG_S)
    ledger.flush()


def test_a_slow_disk_delays_rows_and_stops_nobody(
    ledger: Ledger, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    begins = threading.Event()
    ledger._post(lambda connection: begins.wait(HANG_S))
    monkeypatch.setattr("rlmesh.rl.rollout.ledger.WAIT_S", 0.01)
    ledger.flush()
    begins.set()
    assert "is not written after 0.01 s, and training goes on" in caplog.text


WRITER = """
import os, signal, sys
from pathlib import Path
from rlmesh.rl.rollout.buffer import SampleBuffer
from rlmesh.rl.rollout.ledger import Ledger
from tests.rl.rollout.test_ledger import SETTINGS, train
ledger = Ledger(Path(sys.argv[1]), SETTINGS, lambda: 0.0)
buffer = SampleBuffer(2, 0, 10_000, record=ledger.record)
for step in range(1, 10_000):
    train(buffer, step)
    ledger.flush()
    print(step, flush=True)
"""


def test_what_was_flushed_survives_a_kill(tmp_path: Path) -> None:
    command = [sys.executable, "-c", WRITER, str(tmp_path)]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=env) as writer:
        assert writer.stdout is not None
        for line in writer.stdout:
            if int(line) == 30:
                break
        writer.send_signal(signal.SIGKILL)
        finished = int((writer.stdout.read().split() or ["30"])[-1])
        writer.wait(HANG_S)
    assert faults_of(tmp_path / LEDGER) == []
    assert max(row.step or 0 for row in read_rows(tmp_path / LEDGER) if row.state == "trained") >= finished


KILLED_WRITER = """
import os, signal, sys
from pathlib import Path
from rlmesh.rl.rollout.ledger import Ledger

ledger = Ledger(Path(sys.argv[1]), {"batch_size": 2, "staleness": 0}, lambda: 0.0)
ledger.note("first")
ledger.flush()

def work(connection):
    connection.execute("PRAGMA cache_size = 1")  # so that changes are in the file before the commit
    connection.executemany("INSERT INTO events VALUES (0, 0, ?, 0, ?)", [(n, "x" * 500) for n in range(1000)])
    connection.execute("INSERT INTO slots (line, position, epoch, prompt, state) VALUES (0, 0, 0, 0, 'drawn')")
    os.kill(os.getpid(), signal.SIGKILL)

ledger._do(work)
"""


def test_a_commit_in_whose_middle_the_writer_was_killed_is_undone_for_readers(tmp_path: Path) -> None:
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run([sys.executable, "-c", KILLED_WRITER, str(tmp_path)], env=env, timeout=HANG_S)
    assert done.returncode == -signal.SIGKILL and (tmp_path / f"{LEDGER}-journal").stat().st_size
    assert list(read_rows(tmp_path / LEDGER)) == [] == faults_of(tmp_path / LEDGER)
    with sqlite3.connect(tmp_path / LEDGER) as connection:
        assert connection.execute("SELECT what FROM events").fetchall() == [("first",)]
    connection.close()


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        ("UPDATE slots SET oldest = 0 WHERE position = 4", "position 4, step 3: version 0 is staler than 0"),
        ("UPDATE slots SET newest = 7 WHERE position = 4", "position 4, step 3: version 7 did not exist yet"),
        ("UPDATE slots SET oldest = NULL WHERE position = 4", "position 4 has no version"),
        ("DELETE FROM slots WHERE position = 2", "position 2 is lost"),
        ("UPDATE slots SET state = 'drawn' WHERE position = 1", "position 1 is drawn, and later ones are trained"),
        ("UPDATE slots SET prompt = 0 WHERE position = 1", "prompt 0 occurs 2 times in epoch 0"),
        ("UPDATE slots SET step = 9 WHERE position = 0", "steps are not in drawing order"),
        ("UPDATE slots SET step = 4 WHERE step = 3", "step 3 is missing"),
        ("UPDATE slots SET state = 'dropped' WHERE position = 0", "step 1 has 1 groups, not 2"),
        ("INSERT INTO slots SELECT 1, position, epoch, prompt, state, step, oldest, newest, asked, deaths, reason, at, "
         "void FROM slots WHERE position = 3", "position 3 has 2 rows"),
    ],
)  # fmt: skip
def test_faults_are_found(tmp_path: Path, change: str, fault: str) -> None:
    ledger = Ledger(tmp_path, SETTINGS, lambda: 0.0)
    buffer = SampleBuffer(2, 0, 9, record=ledger.record)
    for step in (1, 2, 3):
        train(buffer, step)
    ledger.close()
    assert faults_of(tmp_path / LEDGER) == []
    with sqlite3.connect(tmp_path / LEDGER) as connection:
        connection.execute(change)
    connection.close()
    assert fault in faults_of(tmp_path / LEDGER)


def test_writing_waits_for_nothing(ledger: Ledger, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither a record nor a flush makes an fsync; a sync does, and nobody waits for it."""
    synced: list[int] = []
    monkeypatch.setattr(os, "fsync", synced.append)
    buffer = SampleBuffer(2, 0, 9, record=ledger.record)
    train(buffer, 1)
    ledger.flush()
    assert synced == []
    ledger.sync().result(HANG_S)
    assert len(synced) == 1
