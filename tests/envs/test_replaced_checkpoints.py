"""A checkpoint that takes the place of an older one: a process that is killed meanwhile leaves one of the two."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from rlmesh.envs.algorithms import checkpoint
from tests.own_time import HANG_S

KILLED = """
import os, shutil, signal, sys
from pathlib import Path
from rlmesh.envs.algorithms.checkpoint import put_in_place

def killed_after(call):
    def wrapped(*args):
        call(*args)
        os.kill(os.getpid(), signal.SIGKILL)
    return wrapped

Path.rename = killed_after(Path.rename)
shutil.rmtree = killed_after(lambda path: None)
put_in_place(Path(sys.argv[1], "new"), Path(sys.argv[1], "checkpoint"))
"""


def folders(tmp_path: Path) -> tuple[Path, Path]:
    new, old = tmp_path / "new", tmp_path / "checkpoint"
    for folder in (new, old):
        folder.mkdir()
        (folder / "state").write_text(folder.name)
    return new, old


def test_a_kill_leaves_the_old_or_the_new_one(tmp_path: Path) -> None:
    probe = folders(tmp_path)
    if not checkpoint._exchange(*probe):
        pytest.skip("this file system cannot exchange two names")
    assert checkpoint._exchange(*probe)  # as they were
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path)], env=env, timeout=HANG_S)
    assert done.returncode == -signal.SIGKILL
    assert (tmp_path / "checkpoint" / "state").read_text() in ("checkpoint", "new")


@pytest.mark.parametrize("exchanges", [True, False])
def test_the_new_one_is_there_and_the_old_one_is_not(
    exchanges: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not exchanges:
        monkeypatch.setattr(checkpoint, "_exchange", lambda one, other: False)
    new, old = folders(tmp_path)
    checkpoint.put_in_place(new, old)
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint"]
    assert (old / "state").read_text() == "new"
    with pytest.raises(OSError) as caught:
        checkpoint.put_in_place(tmp_path / "missing", old)
    assert caught.value.errno == errno.ENOENT and [path.name for path in tmp_path.iterdir()] == ["checkpoint"]


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError])
def test_the_old_one_goes_back_if_the_new_one_does_not_come(
    error: type[BaseException], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    new, old = folders(tmp_path)
    monkeypatch.setattr(checkpoint, "_exchange", lambda one, other: False)
    rename = Path.rename

    def interrupted(path: Path, target: Path) -> Path:
        if path == new:
            raise error
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", interrupted)
    with pytest.raises(error):
        checkpoint.put_in_place(new, old)
    assert (old / "state").read_text() == "checkpoint"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint", "new"]
