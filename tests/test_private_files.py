"""Files that are made for one user alone, and opened only where nobody else can have put them."""

from __future__ import annotations

import errno
import os
import pickle
import stat
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from rlmesh import private_files
from rlmesh.private_files import SHARE_WITH_GROUP, UnsafeFile
from tests.own_time import OwnTime

STRANGER = 65534
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can make files of another user")


def mode(path: Path) -> int:
    return stat.S_IMODE(path.lstat().st_mode)


@pytest.fixture(params=[0o000, 0o022, 0o077, 0o777], ids=oct)
def umask(request: pytest.FixtureRequest) -> Iterator[int]:
    before = os.umask(request.param)
    yield request.param
    os.umask(before)


@pytest.mark.case("a01")
def test_modes_are_the_same_under_every_umask(umask: int, tmp_path: Path) -> None:
    folder = tmp_path / "runs" / "run"
    private_files.make_folder(folder)
    fd = private_files.append_to(folder / "logs" / "a.log")
    os.write(fd, b"line\n")
    os.close(fd)
    private_files.write_whole(folder / "end.json", "{}")
    os.close(private_files.hold(folder / "held-by.json"))
    assert {mode(path) for path in (tmp_path / "runs", folder, folder / "logs")} == {0o700}
    assert {mode(path) for path in folder.rglob("*") if path.is_file()} == {0o600}


def test_what_was_made_too_open_is_closed_when_it_is_written_again(tmp_path: Path) -> None:
    path = tmp_path / "a.log"
    path.write_text("x\n")
    path.chmod(0o666)
    os.close(private_files.append_to(path))
    assert mode(path) == 0o600
    assert private_files.read(path) == b"x\n"


@pytest.mark.case("a01")
def test_a_run_that_is_shared_with_a_group_is_readable_by_it_but_for_secrets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(SHARE_WITH_GROUP, str(os.getegid()))
    private_files.make_folder(tmp_path / "run" / "logs")
    private_files.write_whole(tmp_path / "run" / "job.json", "{}")
    private_files.write_whole(tmp_path / "run" / "state.db", "", secret=True)
    assert mode(tmp_path / "run") == mode(tmp_path / "run" / "logs") == 0o2750
    assert mode(tmp_path / "run" / "job.json") == 0o640
    assert mode(tmp_path / "run" / "state.db") == 0o600
    private_files.check_folder(tmp_path / "run")


ODD: dict[str, tuple[Callable[[Path, Path], object], str]] = {
    "link": (lambda path, victim: path.symlink_to(victim), "is a link, which is not followed"),
    "dangling link": (lambda path, victim: path.symlink_to(victim.with_name("new")), "is a link, which is not"),
    "pipe": (lambda path, victim: os.mkfifo(path), "is no regular file"),
    "hard link": (lambda path, victim: os.link(victim, path), r"has 2 names \(hard links\)"),
}


@pytest.mark.case("a12")
@pytest.mark.parametrize("what", ODD)
def test_odd_files_are_neither_followed_nor_waited_for(what: str, tmp_path: Path, own_time: OwnTime) -> None:
    plant, says = ODD[what]
    victim = tmp_path / "victim"
    victim.write_text("untouched")
    plant(tmp_path / "file", victim)
    began = time.monotonic()
    with pytest.raises(UnsafeFile, match=says):
        private_files.append_to(tmp_path / "file")
    with pytest.raises(UnsafeFile, match=says):
        private_files.refuse_odd(tmp_path / "file")
    if what != "hard link":  # which is the file itself, and may be read
        with pytest.raises(UnsafeFile, match=says):
            private_files.read(tmp_path / "file")
    private_files.write_whole(tmp_path / "file", "whole")  # put in its place
    assert private_files.read(tmp_path / "file") == b"whole"
    assert victim.read_text() == "untouched"
    assert not (tmp_path / "new").exists()
    assert own_time.since(began) < 5.0


@as_root
@pytest.mark.case("a12")
def test_files_and_folders_of_others_are_refused(tmp_path: Path) -> None:
    (tmp_path / "theirs").mkdir(0o700)
    (tmp_path / "theirs" / "x").touch()
    os.chown(tmp_path / "theirs", STRANGER, STRANGER)
    (tmp_path / "file").touch()
    os.chown(tmp_path / "file", STRANGER, STRANGER)
    for work in (private_files.read, private_files.append_to, private_files.refuse_odd):
        with pytest.raises(UnsafeFile, match=f"belongs to uid {STRANGER}, not to you"):
            work(tmp_path / "file")
        with pytest.raises(UnsafeFile, match=f"theirs belongs to uid {STRANGER}, not to you"):
            work(tmp_path / "theirs" / "x")
    with pytest.raises(UnsafeFile):
        private_files.make_folder(tmp_path / "theirs")
    assert private_files.files_in(tmp_path, "*") == []


def test_folders_and_files_that_others_may_write_to(tmp_path: Path) -> None:
    folder = tmp_path / "open"
    folder.mkdir()
    (folder / "x").write_text("1")
    folder.chmod(0o770)
    with pytest.raises(UnsafeFile, match=f"has mode 0770, so others can put files there: chmod -R go-w {folder}"):
        private_files.read(folder / "x")
    folder.chmod(0o755)
    (folder / "x").chmod(0o664)
    with pytest.raises(UnsafeFile, match="has mode 0664, so others can change it: chmod go-w"):
        private_files.read(folder / "x")
    (folder / "x").chmod(0o644)
    assert private_files.read(folder / "x") == b"1"


def test_a_link_to_a_neighbour_is_followed_where_that_is_meant(tmp_path: Path) -> None:
    (tmp_path / "A-0.log").write_text("line")
    (tmp_path / "B-0.log").symlink_to("A-0.log")
    (tmp_path / "C-0.log").symlink_to("../elsewhere")
    with os.fdopen(private_files.open_file(tmp_path / "B-0.log", os.O_RDONLY, neighbours=True)) as file:
        assert file.read() == "line"
    private_files.refuse_odd(tmp_path / "B-0.log")
    for neighbours in (False, True):
        with pytest.raises(UnsafeFile, match="is a link"):
            private_files.open_file(tmp_path / "C-0.log", os.O_RDONLY, neighbours=neighbours)


def test_the_error_travels(tmp_path: Path) -> None:
    (tmp_path / "x").symlink_to("/etc/passwd")
    with pytest.raises(OSError) as caught:
        private_files.read(tmp_path / "x")
    assert caught.value.errno == errno.EPERM
    assert (
        str(pickle.loads(pickle.dumps(caught.value)))
        == str(caught.value)
        == (f"{tmp_path}/x is a link, which is not followed: remove it")
    )


LIMITED = """
import resource, sys
sys.path.insert(0, {root!r})
from rlmesh import private_files
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
try:
    private_files.write_whole({path!r}, b"y" * 5000)
except OSError as error:
    print(error.errno)
"""


@pytest.mark.case("a17")
def test_a_file_is_whole_or_as_it_was(tmp_path: Path) -> None:
    import subprocess

    path = tmp_path / "end.json"
    private_files.write_whole(path, "old")
    root = str(Path(private_files.__file__).parents[1])
    script = LIMITED.format(root=root, path=str(path))
    told = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert told.stdout.split() == [str(errno.EFBIG)], told.stderr
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path], "no draft is left"
    private_files.write_whole(path, "half of an emoji: \ud83d")
    assert path.read_bytes() == b"half of an emoji: \\ud83d"
