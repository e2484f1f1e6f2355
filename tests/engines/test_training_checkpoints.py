"""Checkpoints are whole or not there: kills, errors, other numbers of ranks, other engines."""

from __future__ import annotations

import io
import json
import os
import pickle
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.planner import LoadItemType, ReadItem

from rlmesh.errors import UsageError
from rlmesh.rl.engines.training.checkpoint.checked_reading import TensorsOnly
from rlmesh.rl.engines.training.checkpoint.checksums import sums_of
from rlmesh.rl.engines.training.checkpoint.folders import CURRENT, CheckpointFolder, Saved, SavingThread
from tests.engines import checkpoint_writer
from tests.own_time import HANG_S

# torch says so whenever a process is alone.
pytestmark = pytest.mark.filterwarnings(
    "ignore:torch.distributed is disabled, unavailable or uninitialized:UserWarning"
)

ROOT = Path(__file__).resolve().parents[2]


def start(folder: Path) -> subprocess.Popen[str]:
    path = os.pathsep.join(map(str, (ROOT, ROOT / "launcher")))
    return subprocess.Popen(
        [sys.executable, str(Path(checkpoint_writer.__file__)), str(folder)],
        env={**os.environ, "PYTHONPATH": path}, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_who_is_killed_while_saving_leaves_the_last_complete_one(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    for attempt in range(6):
        process = start(folder)
        assert process.stdout is not None
        try:
            lines = [process.stdout.readline()]
            # It does little else than save, so it is in the middle of that almost whenever this is.
            time.sleep(0.013 * attempt)
            process.send_signal(signal.SIGKILL)
            lines += process.stdout.readlines()
        finally:
            process.kill()
            process.wait()
            process.stdout.close()
        printed = [int(line) for line in lines if line.strip()]
        engine = checkpoint_writer.make()
        engine.load(folder)
        # Killed between the commit and the line, it is one further.
        assert engine.steps in (printed[-1], printed[-1] + 1)
        wanted = 1 - 0.125 * engine.steps
        assert torch.allclose(engine.plain.weight, torch.full_like(engine.plain.weight, wanted), atol=1e-3)
        # What was half written goes with the next complete one.
        engine.save(folder).result(60)
        assert sorted(path.name for path in folder.iterdir()) == [CURRENT, CheckpointFolder(folder).current().data]
        engine.close()


def test_what_others_that_were_killed_left_goes_with_the_next_commit(tmp_path: Path) -> None:
    (tmp_path / f".{CURRENT}.123.tmp").write_text("{")
    (tmp_path / "step-00000007-00000000").mkdir()
    (tmp_path / "notes.tmp").touch()
    engine = checkpoint_writer.make(16)
    data = engine.save(tmp_path).result(HANG_S)
    engine.close()
    assert sorted(path.name for path in tmp_path.iterdir()) == [CURRENT, "notes.tmp", data.name]


def test_one_process_saves_and_loads_without_a_process_group(tmp_path: Path) -> None:
    engine = checkpoint_writer.make()
    checkpoint_writer.step(engine)
    first = engine.save(tmp_path)
    checkpoint_writer.step(engine)
    assert first.result(60).is_dir() and first.done()
    other = checkpoint_writer.make()
    other.load(tmp_path)
    assert other.steps == 1 and torch.allclose(other.plain.weight, torch.tensor(0.875))
    checkpoint_writer.step(other)
    assert torch.equal(other.plain.weight, engine.plain.weight)


def test_saving_before_the_first_step_does_not_change_it(tmp_path: Path) -> None:
    one, other = checkpoint_writer.make(), checkpoint_writer.make()
    one.save(tmp_path).result(60)
    for engine in (one, other):
        checkpoint_writer.step(engine)
    assert torch.equal(one.plain.weight, other.plain.weight)
    third = checkpoint_writer.make()
    third.load(tmp_path)
    checkpoint_writer.step(third)
    assert torch.equal(third.plain.weight, other.plain.weight)


def test_a_disk_that_fails_leaves_the_checkpoint_before(tmp_path: Path) -> None:
    engine = checkpoint_writer.make()
    checkpoint_writer.step(engine)
    engine.save(tmp_path).result(60)
    before = (tmp_path / CURRENT).read_bytes()
    # In place of the file into which the name of the new one goes.
    (tmp_path / f".{CURRENT}.{os.getpid()}.tmp").mkdir()
    checkpoint_writer.step(engine)
    with pytest.raises(OSError, match="the checkpoint of step 2 is not complete"):
        engine.save(tmp_path).result(60)
    assert (tmp_path / CURRENT).read_bytes() == before
    other = checkpoint_writer.make()
    other.load(tmp_path)
    assert other.steps == 1
    with pytest.raises(OSError, match="no checkpoint could be begun"):
        engine.save(tmp_path / CURRENT)


def test_a_folder_says_what_is_wrong_with_it(tmp_path: Path) -> None:
    place = CheckpointFolder(tmp_path)
    with pytest.raises(UsageError, match="holds no complete checkpoint"):
        place.current()
    old, new = place.begin(1), place.begin(2)
    place.commit(Saved(old, 1, "torch", 2))
    assert place.current().data == old and not (tmp_path / new).exists()
    place.commit(Saved(place.begin(2), 2, "another", 2))
    assert place.current().steps == 2 and not (tmp_path / old).exists()
    with pytest.raises(UsageError, match="of kind 'another'; this engine reads 'torch'"):
        checkpoint_writer.make().load(tmp_path)
    fields = json.loads((tmp_path / CURRENT).read_text())
    (tmp_path / CURRENT).write_text(json.dumps({**fields, "format": 99}))
    with pytest.raises(UsageError, match="has format 99; this version reads 1"):
        place.current()


def test_a_checkpoint_that_is_not_ready_in_time_goes_on(tmp_path: Path) -> None:
    from threading import Event

    gate, saver = Event(), SavingThread()

    def work() -> Path:
        assert gate.wait(HANG_S)
        return tmp_path

    saving = saver.start(work)
    with pytest.raises(TimeoutError, match=r"not written after 0\.01 s; it goes on"):
        saving.result(0.01)
    assert not saving.done()
    gate.set()
    assert saving.result(HANG_S) == tmp_path
    saver.wait()


class Payload:
    """Unpickled, it makes a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.touch, (self.path,))


@pytest.mark.case("a02")
def test_nothing_in_a_checkpoint_is_run(tmp_path: Path) -> None:
    folder, mark = tmp_path / "checkpoints", tmp_path / "owned"
    engine = checkpoint_writer.make()
    data = engine.save(folder).result(HANG_S)
    engine.load(folder)
    index = data / ".metadata"
    good = index.read_bytes()

    def forge(content: bytes) -> None:
        """Somebody writes an index, and knows that its checksum is checked."""
        index.write_bytes(content)
        current = json.loads((folder / CURRENT).read_bytes())
        current["files"][index.name] = asdict(sums_of(data, [index.name])[index.name])
        (folder / CURRENT).write_text(json.dumps(current))

    for forged in (pickle.dumps(Payload(mark)), pickle.dumps({"state": Payload(mark)}), b"no pickle", good[:40]):
        forge(forged)
        with pytest.raises(UsageError, match=r"is not loaded: its index \.metadata is torn, or made by somebody else"):
            engine.load(folder)
    metadata = pickle.loads(good)
    # What is no tensor is loaded as data, too.
    name = next(iter(metadata.state_dict_metadata))
    written = io.BytesIO()
    torch.save(Payload(mark), written)
    planner = TensorsOnly()
    item = ReadItem(LoadItemType.BYTE_IO, *[None] * 5)  # type: ignore[arg-type]
    with pytest.raises(pickle.UnpicklingError, match=r"(?i)weights.only"):
        planner.load_bytes(item, io.BytesIO(written.getvalue()))
    for place in metadata.storage_data.values():
        place.relative_path = "../../elsewhere"
    forge(pickle.dumps(metadata))
    with pytest.raises(UsageError, match="it names a file outside of its folder"):
        engine.load(folder)
    forge(good)
    engine.load(folder)
    assert name and not mark.exists()
    engine.close()


@pytest.mark.parametrize("name", ["__0_0.distcp", ".metadata"])
def test_a_file_that_is_torn_or_altered_is_named(tmp_path: Path, name: str) -> None:
    engine = checkpoint_writer.make(64)
    path = engine.save(tmp_path).result(HANG_S) / name
    whole = path.read_bytes()
    middle = len(whole) // 2
    for content, says in (
        (whole[:-1], f"{name} has {len(whole) - 1} bytes, and had {len(whole)} when it was written: it is torn"),
        (whole[:middle] + bytes([whole[middle] ^ 1]) + whole[middle + 1 :], f"{name} was altered: its checksum"),
        (None, f"{name} cannot be read: No such file"),
    ):
        path.unlink() if content is None else path.write_bytes(content)
        with pytest.raises(UsageError, match=re.escape(says)):
            engine.load(tmp_path)
    path.write_bytes(whole)
    path.chmod(0o600)
    engine.load(tmp_path)
    engine.close()


def test_weights_alone_leave_the_optimizer_new(tmp_path: Path) -> None:
    engine, other = checkpoint_writer.make(), checkpoint_writer.make()
    checkpoint_writer.step(engine)
    engine.save(tmp_path).result(HANG_S)
    other.load(tmp_path, weights_only=True)
    assert other.steps == 0 and torch.equal(other.plain.weight, engine.plain.weight)
    assert all(state["step"] == 0 and not state["exp_avg"].any() for state in other.optimizer.state.values())
    for each in (engine, other):
        each.close()


@pytest.mark.case("a02")
def test_what_counts_is_named_by_data_of_the_folder(tmp_path: Path) -> None:
    place = CheckpointFolder(tmp_path)
    whole = {"data": "step-1", "steps": 1, "kind": "torch", "ranks": 1, "format": 1}
    for content, says in (
        ("[]", "has format 'list'"), ("{", "is no JSON"), ('{"format": 1}', "does not say what it should"),
        (json.dumps(whole | {"more": 1}), "does not say what it should"),
        (json.dumps(whole | {"files": {"../a": {"size_bytes": 1, "sha256": "0"}}}), "names a file outside of its"),
        (json.dumps(whole | {"files": [1]}), "expected the sums of files"),
        (json.dumps(whole | {"data": "../other"}), "names data outside of its folder"),
        (json.dumps(whole | {"data": 3}), "names data outside of its folder"),
    ):  # fmt: skip
        (tmp_path / CURRENT).write_text(content)
        with pytest.raises(UsageError, match=says):
            place.current()


@pytest.mark.case("a01")
def test_checkpoints_are_private(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        engine = checkpoint_writer.make()
        folder = tmp_path / "checkpoints"
        data = engine.save(folder).result(HANG_S)
        engine.close()
    finally:
        os.umask(before)
    assert {path.stat().st_mode & 0o777 for path in (folder, data)} == {0o700}
    assert (folder / CURRENT).stat().st_mode & 0o777 == 0o600
    assert not any(path.stat().st_mode & 0o022 for path in data.iterdir())


STRANGER = 65534
WHERE = {
    "the folder": lambda folder, data: folder,
    "what says which one counts": lambda folder, data: folder / CURRENT,
    "the data's folder": lambda folder, data: data,
    "the index": lambda folder, data: data / ".metadata",
    "tensors": lambda folder, data: data / "__0_0.distcp",
}


@pytest.fixture
def saved(tmp_path: Path) -> Iterator[tuple[Any, Path, Path]]:
    """An engine, its folder of checkpoints, and the data's folder there."""
    engine = checkpoint_writer.make(16)
    folder = tmp_path / "checkpoints"
    yield engine, folder, engine.save(folder).result(HANG_S)
    engine.close()


def is_refused(engine: Any, folder: Path, says: str) -> None:
    with pytest.raises(UsageError, match=f"the checkpoint in {folder} is not loaded: {says}") as caught:
        engine.load(folder)
    assert "trust_others=True" in str(caught.value) and f"cp -rL {folder}" in str(caught.value)
    engine.load(folder, trust_others=True)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
@pytest.mark.parametrize("where", WHERE)
def test_what_belongs_to_somebody_else_is_not_loaded(saved: tuple[Any, Path, Path], where: str) -> None:
    engine, folder, data = saved
    path = WHERE[where](folder, data)
    os.chown(path, STRANGER, STRANGER)
    is_refused(engine, folder, rf"{path} belongs to (\w+, )?uid {STRANGER}, not to you \((\w+, )?uid {os.geteuid()}\)")
    os.chown(path, 0, 0)
    engine.load(folder)


@pytest.mark.parametrize("bits", [0o020, 0o002])
@pytest.mark.parametrize("where", WHERE)
def test_what_others_can_write_to_is_not_loaded(saved: tuple[Any, Path, Path], where: str, bits: int) -> None:
    engine, folder, data = saved
    path = WHERE[where](folder, data)
    before = path.stat().st_mode & 0o777
    path.chmod(before | bits)
    is_refused(engine, folder, f"{path} has mode {before | bits:04o}, so other users can change what is in it")
    subprocess.run(["chmod", "-R", "go-w", folder], check=True)  # as the error says
    engine.load(folder)


@pytest.mark.parametrize("where", ["what says which one counts", "the index", "tensors"])
def test_links_in_a_checkpoint_are_not_followed(saved: tuple[Any, Path, Path], where: str, tmp_path: Path) -> None:
    engine, folder, data = saved
    path = WHERE[where](folder, data)
    path.rename(tmp_path / "elsewhere")
    path.symlink_to(tmp_path / "elsewhere")
    is_refused(engine, folder, f"{path} is a link, which is not followed")
    (tmp_path / "name").symlink_to(folder.parent)
    subprocess.run(["cp", "-rL", folder, tmp_path / "mine"], check=True)  # as the error says
    engine.load(tmp_path / "name" / "mine")  # the way to a folder may have links


def test_where_others_can_write_is_told_when_saving(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    engine = checkpoint_writer.make(16)
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty").chmod(0o775)
    engine.save(tmp_path / "empty").result(HANG_S)
    assert (tmp_path / "empty").stat().st_mode & 0o777 == 0o700, "an empty folder is made private"
    engine.load(tmp_path / "empty")
    assert "trust_others" not in caplog.text
    (tmp_path / "shared").mkdir()
    (tmp_path / "shared" / "notes").touch()
    (tmp_path / "shared").chmod(0o775)
    engine.save(tmp_path / "shared").result(HANG_S)
    assert "shared has mode 0775" in caplog.text and "trust_others=True" in caplog.text
    is_refused(engine, tmp_path / "shared", f"{tmp_path / 'shared'} has mode 0775")
    engine.close()
