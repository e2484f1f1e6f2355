"""Commands on run directories that somebody else touched: theirs are not looked at, broken ones spoil nobody's list."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from rlmesh.agent.processes import ownership
from rlmesh.cli.main import main
from rlmesh.job.status import FailureInfo, JobStatus
from rlmesh.run_directory.discovery import RunningJob, running_jobs
from rlmesh.run_directory.records import read_end, remember, write_end
from rlmesh.run_directory.workspace import Hold
from tests.own_time import HANG_S

STRANGER = 65534
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can make files of another user")


def said(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    code = main([*words])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


Running = Callable[..., Path]


@pytest.fixture
def running(tmp_path: Path) -> Iterator[Running]:
    """Makes the socket folder of a job that runs: this process is its driver."""
    holds = []

    def make(name: str = "rlm-mine") -> Path:
        folder = tmp_path / name
        folder.mkdir(0o700)
        holds.append(Hold(folder))
        (folder / "n0").mkdir(0o700)
        about = {
            "job_id": "mine-1", "job_name": "mine", "run_dir": str(tmp_path), "master_endpoint": "unix:///x",
            "started_at": 1.0, "driver_pid": os.getpid(),
        }  # fmt: skip
        (folder / "n0" / "about.json").write_text(json.dumps(about))
        return folder

    yield make
    for hold in holds:
        hold.release()


@pytest.mark.case("a11")
def test_what_others_plant_beside_the_sockets_of_a_job_is_not_looked_at(running: Running, tmp_path: Path) -> None:
    mine = running()
    assert [job.folder for job in running_jobs((str(tmp_path),))] == [mine / "n0"]
    # A folder that all may enter, with links to the real one: a second entry, which `stop` would find left over.
    planted = tmp_path / "rlm-planted"
    (planted / "n1").mkdir(parents=True)
    (planted / "n0").symlink_to(mine / "n0")
    (planted / "n1" / "about.json").symlink_to(mine / "n0" / "about.json")
    (tmp_path / "rlm-link").symlink_to(mine)
    assert [job.folder for job in running_jobs((str(tmp_path),))] == [mine / "n0"]
    planted.chmod(0o700)
    (planted / "n1").chmod(0o700)
    assert [job.folder for job in running_jobs((str(tmp_path),))] == [mine / "n0"]


@as_root
@pytest.mark.case("a11")
def test_folders_of_other_owners_are_not_looked_at(running: Running, tmp_path: Path) -> None:
    mine = running()
    theirs = running("rlm-theirs")
    os.mkfifo(theirs / "n0" / "pipe")
    for path in (theirs / "n0", theirs):
        os.chown(path, STRANGER, STRANGER)
    found = running_jobs((str(tmp_path),))
    assert [job.folder for job in found] == [mine / "n0"]
    os.chown(theirs, 0, 0)  # their folder in one of ours
    assert running_jobs((str(tmp_path),)) == found


def test_folders_of_others_that_have_such_a_name_stay(tmp_path: Path) -> None:
    with TemporaryDirectory(prefix="rlm-", dir=tmp_path) as folder:
        assert (running_jobs((str(tmp_path),)), os.path.exists(folder)) == ([], True)
        (Path(folder) / "n0").mkdir(0o700)
        assert (running_jobs((str(tmp_path),)), os.path.exists(folder)) == ([], True)


def test_the_folder_of_a_driver_that_was_killed_before_its_job_began_is_removed(tmp_path: Path) -> None:
    made = subprocess.Popen(
        [sys.executable, "-c", "import sys; from rlmesh.run_directory.workspace import _make_socket_dir as make\n"
         "folder, hold = make(); (folder / 'n0').mkdir(0o700); (folder / 'n0' / 'key').touch()\n"
         "print(folder, flush=True); sys.stdin.read()"],
        env={**os.environ, "XDG_RUNTIME_DIR": str(tmp_path)}, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert made.stdout is not None
    folder = Path(made.stdout.readline().strip())
    assert folder.parent == tmp_path
    assert (running_jobs((str(tmp_path),)), folder.exists()) == ([], True), "its maker lives"
    made.kill()
    made.communicate(timeout=HANG_S)
    (folder / "file").touch()
    assert (running_jobs((str(tmp_path),)), folder.exists()) == ([], True), "it may be another's"
    (folder / "file").unlink()
    guardian = ownership.hold_folder(str(folder / "n0"))
    assert guardian is not None
    assert (running_jobs((str(tmp_path),)), folder.exists()) == ([], True), "a guardian holds it"
    os.close(guardian)
    assert (running_jobs((str(tmp_path),)), folder.exists()) == ([], False)


@pytest.mark.parametrize("change", [{"driver_pid": "x"}, {"started_at": None}, {"job_name": ["x"]}, {"more": 1}])
def test_an_entry_that_makes_no_sense_is_left_out(change: dict[str, object], running: Running, tmp_path: Path) -> None:
    path = running() / "n0" / "about.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    assert running_jobs((str(tmp_path),)) == []
    assert RunningJob.__name__ == "RunningJob"


MALFORMED = {
    "a list": "[]",
    "a text": '"x"',
    "no JSON": "{",
    "empty": "",
    "deep": "[" * 100_000,
    "a time of the wrong kind": '{"job_id": "i", "job_name": "bad", "stage": "failed", "started_at": "soon"}',
    "a time that is none": '{"job_id": "i", "job_name": "bad", "stage": "failed", "started_at": 1e400, "ended_at": 1}',
    "members of the wrong kind": '{"job_id": "i", "job_name": "bad", "stage": "failed", "started_at": 1, '
    '"ended_at": 2, "failures": [], "members": [1]}',
    "failures of the wrong kind": '{"job_id": "i", "job_name": "bad", "stage": "failed", "started_at": 1, '
    '"ended_at": 2, "failures": [{}], "members": []}',
}


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two runs in this user's list, ``good`` and ``bad``, which both ended well."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    for number, name in enumerate(("good", "bad")):
        folder = tmp_path / name
        (folder / "logs").mkdir(parents=True)
        (folder / "logs" / "A-0.log").write_text(f"a line of {name}\n")
        write_end(JobStatus(name, f"{name}-1", "succeeded", 100.0 + number, str(folder)), 160.0)
        remember(folder)
    return tmp_path


@pytest.mark.case("a15")
@pytest.mark.parametrize("what", MALFORMED)
def test_one_malformed_record_spoils_no_list(what: str, runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (runs / "bad" / "end.json").write_text(MALFORMED[what])
    code, out, err = said(capsys, "ps", "--all")
    assert (code, err) == (0, "")
    assert f"good-1  good  succeeded after 1:00  {runs}/good\n" in out
    assert f"-  bad  unreadable  {runs}/bad\n" in out
    code, out, err = said(capsys, "status", "good")
    assert (code, out.splitlines()[0]) == (0, f"good-1  good  succeeded after 1:00  {runs}/good")
    code, out, err = said(capsys, "status", str(runs / "bad"))
    assert code == 1 and "unreadable" in out and "its record cannot be read" in out, (out, err)
    for job in ("good", str(runs / "bad")):
        code, out, err = said(capsys, "logs", "--job", job)
        assert (code, err) == (0, "") and "A:0 | a line of" in out


@as_root
@pytest.mark.case("a12")
def test_a_run_of_somebody_else_is_not_read(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bad = runs / "bad"
    for path in (*bad.rglob("*"), bad):
        os.chown(path, STRANGER, STRANGER)
    code, out, _ = said(capsys, "ps", "--all")
    assert code == 0 and "bad  unreadable" in out and "good-1  good  succeeded" in out
    code, _, err = said(capsys, "logs", "--job", str(bad))
    assert code == 2 and f"belongs to uid {STRANGER}, not to you" in err
    code, _, err = said(capsys, "timeline", str(bad))
    assert code == 2 and f"belongs to uid {STRANGER}, not to you" in err


ESCAPES = "\x1b]0;owned\x07\x1b[2J\x1b[31mred\x9b1m\b\r\u202eevil\ud83d"
SHOWN = r"\x1b]0;owned\x07\x1b[2J\x1b[31mred\x9b1m\x08\r\u202eevil\ud83d"


@pytest.mark.case("a15")
def test_terminal_escapes_are_shown_and_not_obeyed(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bad = runs / "bad"
    failures = (FailureInfo(f"A:0 died of {ESCAPES}"),)
    write_end(JobStatus(f"bad{ESCAPES}", "bad-1", "failed", 101.0, str(bad), failures=failures), 160.0)
    # Of a line that a program writes over, readers of logs show the last state.
    (bad / "logs" / "A-0.log").write_bytes(f"bar\rlog {ESCAPES[:-1]} end\n".replace("\b\r", "\b").encode())
    for words in (("ps", "--all"), ("status", str(bad)), ("logs", "--job", str(bad)), ("status", f"no{ESCAPES}")):
        _, out, err = said(capsys, *words)
        assert [hex(ord(char)) for char in out + err if char != "\n" and not char.isprintable()] == [], words
        assert r"\x1b]0;owned\x07\x1b[2J\x1b[31mred" in out + err
    _, out, _ = said(capsys, "status", str(bad))
    first, _, rest = SHOWN.partition(r"\r")  # where a line ends
    assert f"first cause: A:0 died of {first}\n    {rest}\n" in out and f"bad{SHOWN}  failed" in out
    end = read_end(bad)
    assert end is not None and end.job_name == f"bad{ESCAPES}", "what is stored is as it was"
