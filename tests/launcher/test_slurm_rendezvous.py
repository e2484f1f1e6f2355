"""How the tasks of a step find their head."""

from __future__ import annotations

import os
import stat
import threading
from pathlib import Path

import pytest

from rlmesh import private_files
from rlmesh.errors import LaunchError
from rlmesh.runtime.connections.security import make_key
from rlmesh_launcher.slurm_rendezvous import HeadGone, Munge, ServerAddress, SlurmRendezvous
from tests.own_time import HANG_S


class Clock:
    """Time that passes when somebody sleeps."""

    def __init__(self) -> None:
        self.now, self.naps = 0.0, 0

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        self.naps += 1


def test_tasks_with_the_key_find_the_head(tmp_path: Path) -> None:
    key = make_key()
    head = SlurmRendezvous(tmp_path / "meet", "17.0-0", key)
    assert head.make_key() == key
    others = SlurmRendezvous(tmp_path / "meet", "17.0-0", key)
    found: list[ServerAddress] = []
    thread = threading.Thread(target=lambda: found.append(others.find(10.0)))
    thread.start()
    head.publish("fd00::1", 4711, key)
    thread.join(HANG_S)
    assert found == [ServerAddress("fd00::1", 4711, key)]
    assert stat.S_IMODE(head.path.stat().st_mode) == 0o600
    assert key.hex() not in head.path.read_text()
    head.forget()
    head.forget()
    assert not (tmp_path / "meet").exists()


def test_the_wait_ends_and_says_what_to_do(tmp_path: Path) -> None:
    clock = Clock()
    rendezvous = SlurmRendezvous(tmp_path, "17.0-0", make_key(), clock=clock, sleep=clock.sleep)
    with pytest.raises(LaunchError) as caught:
        rendezvous.find(60.0)
    assert f"there is no {rendezvous.path} here" in str(caught.value)
    assert "RLMESH_RENDEZVOUS_DIR" in str(caught.value)
    assert 60.0 <= clock.now < 62.0
    assert clock.naps < 100


@pytest.mark.parametrize("change", ["other key", "other content", "other start", "half", "empty"])
def test_what_others_wrote_is_refused(change: str, tmp_path: Path) -> None:
    key = make_key()
    rendezvous = SlurmRendezvous(tmp_path, "17.0-1", key)
    SlurmRendezvous(tmp_path, "17.0-1", make_key() if change == "other key" else key).publish(
        "10.0.0.9", 80, make_key() if change == "other key" else key
    )
    text = rendezvous.path.read_bytes()
    if change == "other content":
        text = text.replace(b"10.0.0.9", b"10.6.6.6")
    elif change == "other start":
        SlurmRendezvous(tmp_path, "17.0-0", key).publish("10.0.0.9", 80, key)
        text = (tmp_path / "17.0-0.head").read_bytes()
    elif change == "half":
        text = text[:20]
    elif change == "empty":
        text = b""
    rendezvous.path.write_bytes(text)
    with pytest.raises(LaunchError, match=r"not signed with this job's key|of another start"):
        rendezvous.find(1.0)


def test_a_head_that_gives_up_says_so(tmp_path: Path) -> None:
    SlurmRendezvous(tmp_path, "17.0-0", None, Munge("/nowhere")).give_up("no munge here", 9)
    with pytest.raises(LaunchError, match=r"the head \(task 0\) gave up: no munge here") as caught:
        SlurmRendezvous(tmp_path, "17.0-0", make_key()).find(1.0)
    assert isinstance(caught.value, HeadGone)
    assert caught.value.exit_code == 9


def test_old_files_are_removed(tmp_path: Path) -> None:
    old, new = tmp_path / "slurm-1.0-0.head", tmp_path / "slurm-2.0-0.head"
    for path in (old, new):
        path.write_text("x")
    os.utime(old, (0, 0))
    SlurmRendezvous(tmp_path, "slurm-3.0-0", make_key()).publish("10.0.0.1", 1, make_key())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["slurm-2.0-0.head", "slurm-3.0-0.head"]


def test_jobs_that_end_meanwhile_disturb_no_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another job removes its file after it was listed, and the folder before the new file is in it."""
    folder, key = tmp_path / "meet", make_key()
    write, removed = private_files.write_whole, list[Path]()

    def write_whole(path: Path, content: bytes, *, secret: bool) -> None:
        if not removed:
            (folder / "gone.head").unlink()
            folder.rmdir()
            removed.append(folder)
        write(path, content, secret=secret)

    monkeypatch.setattr(private_files, "write_whole", write_whole)
    folder.mkdir(0o700)
    (folder / "gone.head").symlink_to("nothing")  # it is listed, and not there
    SlurmRendezvous(folder, "17.0-0", key).publish("10.0.0.1", 1, key)
    assert SlurmRendezvous(folder, "17.0-0", key).find(1.0) == ServerAddress("10.0.0.1", 1, key)
    monkeypatch.setattr(private_files, "write_whole", lambda *args, **options: os.open(tmp_path / "no" / "file", 0))
    with pytest.raises(LaunchError, match="cannot say where it listens"):
        SlurmRendezvous(folder, "17.0-0", key).publish("10.0.0.1", 1, key)


def fake_munge(folder: Path, uid: str, code: int = 0) -> None:
    """``munge`` and ``unmunge`` that write what the real ones do."""
    (folder / "munge").write_text("#!/bin/sh\nprintf 'MUNGE:'\nod -An -v -tx1 | tr -d ' \\n'\n")
    (folder / "unmunge").write_text(
        f"#!/usr/bin/env python3\nimport sys\nsys.stdout.write('STATUS: x\\nUID:   me ({uid})\\nLENGTH: 1\\n\\n')\n"
        f"sys.stdout.write(bytes.fromhex(sys.stdin.read().strip()[6:]).decode())\nsys.exit({code})\n"
    )
    for name in ("munge", "unmunge"):
        (folder / name).chmod(0o755)


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
    return folder


@pytest.mark.parametrize("code", [0, 17])
def test_munge_carries_the_key(code: int, programs: Path, tmp_path: Path) -> None:
    fake_munge(programs, "1000", code)
    head = SlurmRendezvous(tmp_path, "a", None, Munge(uid=1000))
    key = head.make_key()
    head.publish("10.0.0.1", 99, key)
    found = SlurmRendezvous(tmp_path, "a", None, Munge(uid=1000)).find(1.0)
    assert (found.host, found.port, found.key) == ("10.0.0.1", 99, key)
    assert key.hex() not in repr(found)


def test_the_credential_of_somebody_else_is_refused(programs: Path, tmp_path: Path) -> None:
    fake_munge(programs, "1001")
    rendezvous = SlurmRendezvous(tmp_path, "a", None, Munge(uid=1000))
    rendezvous.publish("10.0.0.1", 99, make_key())
    with pytest.raises(LaunchError, match="not made by user 1000"):
        rendezvous.find(1.0)


def test_a_credential_that_expired_is_refused(programs: Path, tmp_path: Path) -> None:
    fake_munge(programs, "1000", 15)
    rendezvous = SlurmRendezvous(tmp_path, "a", None, Munge(uid=1000))
    rendezvous.publish("10.0.0.1", 99, make_key())
    with pytest.raises(LaunchError, match="unmunge failed: exit code 15"):
        rendezvous.find(1.0)


def test_without_munge_the_error_names_the_other_ways(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(LaunchError, match=r"no munge on this node.*RLMESH_KEY.*--key-file"):
        SlurmRendezvous(tmp_path, "a", None, Munge(uid=1000)).publish("10.0.0.1", 99, make_key())
