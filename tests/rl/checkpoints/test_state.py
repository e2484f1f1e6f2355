"""The trainer's part of a checkpoint: what it can hold, and that it is whole or not there."""

from __future__ import annotations

import os
import random
import stat
from collections.abc import Iterable, Mapping
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from rlmesh import JobInfo, WorkerContext, acting_as
from rlmesh.errors import UsageError
from rlmesh.observe.files.metric_files import read_records
from rlmesh.rl.checkpoints.resuming import TrainerCheckpoints
from rlmesh.rl.checkpoints.state import decoded, encoded, seed_generators
from rlmesh.rl.checkpoints.store import CheckpointStore, checkpoint_folder, saved_step
from rlmesh.rl.checkpoints.writer import CheckpointWriter
from rlmesh.rl.engines.training.checkpoint.folders import CheckpointFolder
from rlmesh.rl.trainers.here import MetricsLink
from rlmesh.rl.trainers.progress import Progress
from tests.own_time import HANG_S
from tests.rl.checkpoints.runs import make


def test_a_state_comes_back_as_it_was() -> None:
    state: dict[str, Any] = {
        "number": 0.1 + 0.2, "none": None, "text": "ä", "nested": [{"a": (1, (2.5,))}, True], "bytes": b"\0\xff",
        "array": np.arange(6, dtype=np.int16).reshape(2, 3), "empty": np.zeros((0, 4)), "scalar": np.float32(0.5),
        "zero_d": np.array(2**40), "same_dtype": [np.arange(2, dtype=np.int16), np.array([1.5])],
    }  # fmt: skip
    whole = encoded(state)
    state["array"][:] = 0  # a later change is not part of it
    found = decoded(whole)
    state["array"] = np.arange(6, dtype=np.int16).reshape(2, 3)
    assert found.keys() == state.keys()
    for name, value in state.items():
        np.testing.assert_equal(found[name], value)
        if isinstance(value, np.ndarray):
            assert found[name].dtype == value.dtype and found[name].flags.writeable


@pytest.mark.parametrize(
    ("value", "says"),
    [
        ({"a": [{1}]}, r"state\['a'\]\[0\] is a set: a state has numbers"),
        ({"a": {1: 2}}, r"state\['a'\] has the key 1: the keys of a state are texts"),
        ({"a": torch.ones(1)}, "is a Tensor.*tensor.numpy"),
        ({"a": np.array([None])}, "is a ndarray"),
    ],
)
def test_what_a_state_cannot_have_is_named(value: dict[str, Any], says: str) -> None:
    with pytest.raises(UsageError, match=says):
        encoded(value)


def test_generators_follow_from_seed_step_and_who() -> None:
    def numbers(*given: Any) -> tuple[float, float, float]:
        seed_generators(*given)
        return random.random(), float(np.random.random()), float(torch.rand(()))

    first = numbers(1, 2, ("ACTOR", 0))
    assert numbers(1, 2, ("ACTOR", 0)) == first
    others = [numbers(2, 2, ("ACTOR", 0)), numbers(1, 3, ("ACTOR", 0)), numbers(1, 2, ("ACTOR", 1))]
    assert len({first, *others, numbers(1, 2, ("CRITIC", 0))}) == 5


def commit(store: CheckpointStore, step: int, **metrics: float) -> None:
    (checkpoint_folder(store.run_dir, step) / "actor").mkdir(parents=True)
    (checkpoint_folder(store.run_dir, step) / "actor" / "current.json").write_text("{}")
    assert saved_step(store.run_dir) < step  # it does not count yet
    about = {"metrics": metrics, "settings": {}, "position": {}}
    store.commit(step, ["actor"], encoded({"step": step}), about)
    assert store.read(step).trainer_state() == {"step": step}


def test_the_latest_and_the_best_stay(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep_last=2, keep_best="val")
    for step, value in enumerate((0.1, 0.5, 0.4, 0.5, 0.2), 1):
        commit(store, step, val=value)
    commit(store, 6)
    assert store.best_step() == 2 and CheckpointStore(tmp_path, keep_best="-val").best_step() == 1
    store.prune()
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == [
        "step-000002", "step-000005", "step-000006",
    ]  # fmt: skip
    (checkpoint_folder(tmp_path, 7) / "actor").mkdir(parents=True)
    assert store.latest_step == 6
    store.remove_incomplete()
    assert not checkpoint_folder(tmp_path, 7).exists() and store.latest_step == 6


class Recorded:
    """An object with a record of its own."""

    def __init__(self, value: Any = 0) -> None:
        self.value, self.calls = value, list[Any]()

    def state(self) -> Mapping[str, Any]:
        return {"value": self.value}

    def restore(self, state: Mapping[str, Any]) -> None:
        self.calls.append(state["value"])

    def go_back(self, step: int) -> None:
        self.calls.append(f"after {step}")


class Plain(Recorded):
    go_back = None  # type: ignore[assignment]


def test_a_trainer_that_restarts_alone_goes_on_from_what_was_noted(tmp_path: Path) -> None:
    def trainer(*objects: Any) -> TrainerCheckpoints:
        named = dict(zip(("buffer", "controller"), objects, strict=True))
        context = WorkerContext(JobInfo("j", "j"), "TRAINER", 0, 1, MetricsLink(tmp_path), run_dir=tmp_path)
        with acting_as(context):
            return TrainerCheckpoints(
                make(tmp_path), tmp_path, roles=list, objects=lambda: named, position=lambda step: {},
                tell=lambda text: None,
            )  # fmt: skip

    before = trainer(Recorded(np.arange(9)), Plain(3))
    before.finish(7, {"reward_mean": 0.5})
    buffer, controller = Recorded(), Plain()
    after = trainer(buffer, controller)
    assert after.step_after({7}) == 7 and after.lost == 0
    assert after.restore(7) == {"reward_mean": 0.5}
    assert buffer.calls == ["after 7"] and controller.calls == [3]
    # The members in training are not where the trainer was: they begin anew, and so does all else.
    assert after.step_after({0}) == 0 and after.lost == 7
    after.restore(0)
    assert (buffer.calls[-1], controller.calls[-1]) == (0, 0)
    # A state that is too large to be noted is in checkpoints only.
    trainer(Recorded(), Plain("x" * 70_000)).finish(3, {})
    assert Progress.read(tmp_path).state is None
    assert trainer(Recorded(), Plain()).step_after({3}) == 0


def test_a_checkpoint_is_private_whatever_the_umask(tmp_path: Path) -> None:
    before = os.umask(0o002)
    try:
        folder = checkpoint_folder(tmp_path, 1)
        CheckpointFolder(folder / "actor").begin(1)
        (folder / "actor" / "current.json").write_text("{}")
        CheckpointStore(tmp_path).commit(
            1, ["actor"], encoded({"a": np.zeros(2)}), {"metrics": {}, "settings": {}, "position": {}}
        )
        Progress(1, 0, "{}").write(tmp_path)
    finally:
        os.umask(before)
    made = [tmp_path / "checkpoints", folder, folder / "actor", *(folder / "actor").glob("step-*"), folder / "trainer"]
    assert {stat.S_IMODE(path.stat().st_mode) for path in made} == {0o700}
    files = [tmp_path / "progress.json", folder / "checkpoint.json", *(folder / "trainer").iterdir()]
    assert {stat.S_IMODE(path.stat().st_mode) for path in files} == {0o600} and len(files) == 4


@pytest.mark.parametrize("name", ["", "checkpoint.json", "trainer", "trainer/state.json"])
def test_a_checkpoint_that_others_can_have_written_is_refused(tmp_path: Path, name: str) -> None:
    store = CheckpointStore(tmp_path)
    commit(store, 1)
    open_to_others = checkpoint_folder(tmp_path, 1) / name
    open_to_others.chmod(0o777)
    with pytest.raises(UsageError, match=r"is refused: .* has mode 0777, so other users can change .*chmod -R go-w"):
        store.read(1).trainer_state()
    open_to_others.chmod(0o700)
    assert store.read(1).trainer_state() == {"step": 1}


def test_progress_that_others_can_have_written_is_refused(tmp_path: Path) -> None:
    Progress(1, 0, "{}").write(tmp_path)
    (tmp_path / "progress.json").chmod(0o666)
    with pytest.raises(UsageError, match=r"the run cannot go on: .*progress\.json has mode 0666.*chmod go-w"):
        Progress.read(tmp_path)


class Actor:
    """A role whose part is written at once, or fails."""

    def __init__(self, run_dir: Path, faults: Mapping[int, str]) -> None:
        self.run_dir, self.faults = run_dir, faults

    def call(self, method: str, step: int, *given: Any) -> Any:
        folder = checkpoint_folder(self.run_dir, step) / "actor"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "current.json").write_text("{}")
        found = self.faults.get(step, "") if method == "saved" else ""
        return SimpleNamespace(result=lambda: [found])


def writer_of(run_dir: Path, faults: Mapping[int, str] | None = None) -> CheckpointWriter:
    worker: Any = SimpleNamespace(alarm=lambda text: None)
    actor = Actor(run_dir, faults or {})
    return CheckpointWriter(CheckpointStore(run_dir), lambda: [("actor", actor)], worker, lambda text: None)


ABOUT: dict[str, Any] = {"metrics": {}, "settings": {}, "position": {}}


def test_parts_of_a_failed_checkpoint_leave_the_disk(tmp_path: Path) -> None:
    writer = writer_of(tmp_path, {2: "No space left on device", 3: "No space left on device"})
    for step in (1, 2, 3, 4):
        assert writer.begin(step)
        writer.complete(step, {}, ABOUT)
        assert writer.wait(HANG_S)
        failed = [checkpoint_folder(tmp_path, one) for one in (2, 3) if one != step]
        assert not any(one.exists() for one in failed), "it would stay until the run starts again"
    assert writer.failures == 2 and saved_step(tmp_path) == 4


def test_a_checkpoint_counts_after_the_records_of_its_objects(tmp_path: Path) -> None:
    writer, record, failed = writer_of(tmp_path), Future[None](), Future[None]()
    failed.set_exception(OSError("told by the ledger"))
    assert writer.begin(1)
    writer.complete(1, {}, ABOUT, [record, failed])
    assert not writer.wait(0.2) and saved_step(tmp_path) == 0
    record.set_result(None)
    assert writer.wait(HANG_S) and saved_step(tmp_path) == 1


def test_reports_of_a_run_in_one_process_replace_those_of_the_run_that_it_goes_on_from(tmp_path: Path) -> None:
    def run(steps: Iterable[int], reward: float) -> None:
        context = WorkerContext(JobInfo("j", "j"), "TRAINER", 0, 1, MetricsLink(tmp_path), run_dir=tmp_path)
        for step in steps:
            context.report(step=step, reward_mean=reward)

    run(range(1, 4), 0.0)
    file = tmp_path / "metrics.jsonl"
    file.write_bytes(file.read_bytes() + b'{"at": 1.0, "role": "TRAI')  # the process was killed
    run(range(2, 5), 1.0)
    found = [(one.step, one.metrics["reward_mean"]) for one in read_records(file)]
    assert found == [(1, 0.0), (2, 1.0), (3, 1.0), (4, 1.0)]
