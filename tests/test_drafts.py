"""What a killed writer leaves is removed by the next process that writes there; what may be in use is not."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from rlmesh import drafts, private_files
from rlmesh.cli.output_file import write_output
from rlmesh.drafts import Draft, draft_beside, remove_drafts
from rlmesh.envs.batches.sample_batch import SampleBatch
from rlmesh.envs.offline import write_batch
from rlmesh.rl.data.files import write_parquet
from rlmesh.rl.reading.export import _copied
from tests.own_time import HANG_S

STRANGER = 65534
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can make files of another user")

WRITERS: dict[str, Callable[[Path], object]] = {
    "a.json": lambda path: private_files.write_whole(path, "{}"),
    "a.txt": lambda path: write_output(path, "text"),
    "a.npz": lambda path: write_batch(path, SampleBatch({"obs": np.zeros(2)})),
    "a.parquet": lambda path: write_parquet([{"prompt": "p"}], path),
    "a.learners": lambda path: save_learners(path),
    "exported": lambda path: _copied(Path(__file__).parent / "typing", path, 1),
}
KILLED = """
import os, pathlib, signal, sys
from tests.test_drafts import WRITERS

def killed(*_):
    os.kill(os.getpid(), signal.SIGKILL)

os.replace = killed
path = pathlib.Path(sys.argv[1])
WRITERS[path.name](path)
"""
KILLED_CHECKPOINT = """
import os, pathlib, shutil, signal, sys
from rlmesh.envs.algorithms import checkpoint
from rlmesh.envs.algorithms.ppo import PPOConfig

def killed(*_):
    os.kill(os.getpid(), signal.SIGKILL)

checkpoint.put_in_place = killed
PPOConfig().environment("CartPole-v1").build().save(sys.argv[1])
"""


@pytest.fixture(autouse=True)
def new_process() -> Iterator[None]:
    """This process has not looked into any folder yet."""
    drafts._looked_in.clear()
    yield
    drafts._looked_in.clear()


def run(program: str, path: Path) -> int:
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    return subprocess.run([sys.executable, "-c", program, str(path)], env=env, timeout=HANG_S).returncode


def left(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def save_learners(path: Path) -> None:
    from rlmesh.envs.algorithms.ppo import PPOConfig

    algorithm = PPOConfig().environment("CartPole-v1").build()
    algorithm.learner_group.save(path)
    algorithm.stop()


def draft_of(path: Path, pid: int | str, where: str = "") -> Path:
    """The draft that a process would write."""
    return path.with_name(f".{path.name}.{pid}-1-{where or drafts._here()}.draft")


@pytest.fixture
def dead() -> int:
    """The process id of a process that has ended."""
    child = subprocess.Popen(["true"])
    child.wait()
    return child.pid


def written(path: Path) -> None:
    private_files.write_whole(path, "new")


@pytest.mark.parametrize("name", WRITERS)
def test_the_draft_of_a_killed_writer_goes_with_the_next_write(name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    assert run(KILLED, path) == -signal.SIGKILL
    (draft,) = left(tmp_path)
    assert draft.startswith(f".{name}.") and draft.endswith(".draft")
    WRITERS[name](path)
    assert left(tmp_path) == [name]


def test_a_block_that_raises_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt), Draft(tmp_path / "a") as file:
        file.write(b"half")
        raise KeyboardInterrupt
    assert left(tmp_path) == []


def test_the_draft_of_a_living_process_stays_however_old(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drafts, "STALE_S", -HANG_S)
    draft = draft_of(tmp_path / "a", os.getppid())
    draft.touch()
    written(tmp_path / "a")
    assert left(tmp_path) == [draft.name, "a"]


@pytest.mark.parametrize("where", ["0123456789abcdef-effffffc", "0-0"], ids=["another host", "unknown"])
def test_a_draft_from_elsewhere_stays_for_an_hour(
    where: str, tmp_path: Path, dead: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    draft = draft_of(tmp_path / "a", dead, where)
    draft.touch()
    os.utime(draft, (0, 0))  # as a copy that keeps its time: when it was made counts
    written(tmp_path / "a")
    assert left(tmp_path) == [draft.name, "a"]
    drafts._looked_in.clear()
    monkeypatch.setattr(drafts, "STALE_S", -HANG_S)
    written(tmp_path / "a")
    assert left(tmp_path) == ["a"]


def test_where_boots_cannot_be_told_apart_no_process_id_counts(
    tmp_path: Path, dead: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(drafts, "_here", lambda: "0-0")
    draft = draft_of(tmp_path / "a", dead)
    draft.touch()
    written(tmp_path / "a")
    assert left(tmp_path) == [draft.name, "a"]


@as_root
def test_a_draft_of_another_user_stays(tmp_path: Path, dead: int) -> None:
    draft = draft_of(tmp_path / "a", dead)
    draft.touch()
    os.chown(draft, STRANGER, -1)
    written(tmp_path / "a")
    assert left(tmp_path) == [draft.name, "a"]


@pytest.mark.parametrize(
    "pattern",
    [".a.{pid}-1", "a.{pid}-1-{here}.draft", "..{pid}-1-{here}.draft", ".a.{pid}-1-{here}.draft.bak",
     ".a.x{pid}-1-{here}.draft", ".a.{pid}-{here}.draft", ".a.draft"],
)  # fmt: skip
def test_other_names_stay(pattern: str, tmp_path: Path, dead: int) -> None:
    name = pattern.format(pid=dead, here=drafts._here())
    (tmp_path / name).touch()
    written(tmp_path / "b")
    assert left(tmp_path) == sorted([name, "b"])


@pytest.mark.parametrize("target", ["file", "folder"])
def test_a_link_and_what_it_shows_stay(target: str, tmp_path: Path, dead: int) -> None:
    outside, folder = tmp_path / "outside", tmp_path / "run"
    folder.mkdir(mode=0o700)
    outside.mkdir()
    (outside / "file").touch()
    link = draft_of(folder / "a", dead)
    link.symlink_to(outside / "file" if target == "file" else outside)
    written(folder / "a")
    assert link.is_symlink() and left(outside) == ["file"]


def test_a_folder_is_listed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    listed: list[int] = []
    names = os.listdir

    def counted(folder: int) -> list[str]:
        listed.append(folder)
        return names(folder)

    monkeypatch.setattr(os, "listdir", counted)
    for name in ("a", "b", "a"):
        written(tmp_path / name)
    assert len(listed) == 1


def test_a_killed_checkpoint_goes_with_the_next_one(tmp_path: Path) -> None:
    from rlmesh.envs.algorithms.ppo import PPOConfig

    assert run(KILLED_CHECKPOINT, tmp_path / "checkpoint") == -signal.SIGKILL
    (draft,) = left(tmp_path)
    assert left(tmp_path / draft)
    algorithm = PPOConfig().environment("CartPole-v1").build()
    algorithm.save(tmp_path / "checkpoint")
    algorithm.stop()
    assert left(tmp_path) == ["checkpoint"]


def test_the_draft_of_a_folder_stays_while_the_folder_is_absent(tmp_path: Path, dead: int) -> None:
    draft = draft_of(tmp_path / "model", dead)
    (draft / "old").mkdir(parents=True)
    written(tmp_path / "a")
    assert left(tmp_path) == sorted([draft.name, "a"])
    drafts._looked_in.clear()
    (tmp_path / "model").mkdir()
    remove_drafts(tmp_path / "model")
    assert left(tmp_path) == ["a", "model"]


def test_a_folder_from_elsewhere_stays_while_a_file_in_it_changes(
    tmp_path: Path, dead: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "model").mkdir()
    draft = draft_of(tmp_path / "model", dead, "0123456789abcdef-1")
    draft.mkdir()
    (draft / "part").touch()
    about, times = os.stat, {draft.name: -4000.0}

    def changed(path: str | int, **more: object) -> os.stat_result:
        found = about(path, **more)  # type: ignore[arg-type]
        values = [*found[:9], found.st_ctime + times.get(str(path), 0.0)]
        return os.stat_result(values)

    monkeypatch.setattr(os, "stat", changed)
    remove_drafts(tmp_path / "model")
    assert left(tmp_path) == sorted([draft.name, "model"])
    drafts._looked_in.clear()
    times["part"] = -4000.0
    remove_drafts(tmp_path / "model")
    assert left(tmp_path) == ["model"]


SCRATCH = """
import os, pathlib, signal
from rlmesh.drafts import scratch_folder
pathlib.Path(scratch_folder("rlmesh-test"), "file").touch()
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_the_temporary_folder_of_a_killed_process_goes_with_the_next_one(
    tmp_path: Path, dead: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setattr(drafts, "STALE_S", -HANG_S)
    here = drafts._here()
    for pid, where in ((os.getppid(), here), (dead, "0123456789abcdef-1")):  # of a living process, and from elsewhere
        (tmp_path / f".rlmesh-test.{pid}-1-{where}.scratch").mkdir()
    others = left(tmp_path)
    assert run(SCRATCH, tmp_path) == -signal.SIGKILL and len(left(tmp_path)) == 3
    folder = Path(drafts.scratch_folder("rlmesh-other"))
    assert left(tmp_path) == sorted([*others, folder.name]) and folder.stat().st_mode & 0o777 == 0o700


def test_a_long_name_has_a_draft(tmp_path: Path) -> None:
    written(tmp_path / ("é" * 127))
    assert left(tmp_path) == ["é" * 127]


def test_the_name_tells_the_writer(tmp_path: Path) -> None:
    found = drafts._NAME.fullmatch(os.path.basename(draft_beside(tmp_path / "a.json")))
    assert found is not None and found.groups() == ("a.json", str(os.getpid()), drafts._here(), "draft")
    assert re.fullmatch("[0-9a-f]{24}-[0-9a-f]+", drafts._here())
