"""What a run writes is for its user alone, and what others put into its folders is neither followed nor believed."""

from __future__ import annotations

import json
import math
import os
import pickle
import re
import shutil
import signal
import sqlite3
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import pytest

from rlmesh import DLJobBuilder
from rlmesh.driver.driver import described
from rlmesh.errors import UsageError
from rlmesh.master.state.last_state import last_graph
from rlmesh.master.state.store import OF_PICKLES
from rlmesh.private_files import SHARE_WITH_GROUP
from tests.master.launched import ROOT, TOY, Launched, launch
from tests.master.private_job import SECRETS
from tests.own_time import OwnTime

SCRIPT = Path(__file__).with_name("private_job.py")
STRANGER = 65534
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can make files of another user")
REAL = re.compile(r"real-value-\d")


@contextmanager
def umask(mask: int) -> Iterator[None]:
    before = os.umask(mask)
    try:
        yield
    finally:
        os.umask(before)


def table() -> list[tuple[str, int]]:
    """Patterns and modes of the table in docs/security.md, most special first."""
    rows = []
    for line in (ROOT / "docs/security.md").read_text().splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) == 5 and re.fullmatch(r"0\d{3}", cells[2]):
            rows += [(name, int(cells[2], 8)) for name in re.findall(r"`([^`]+)`", cells[0])]
    return rows


def files_below(folder: Path) -> Iterator[Path]:
    yield folder
    yield from sorted(folder.rglob("*"))


def row_of(name: str, is_folder: bool) -> int | None:
    for pattern, mode in table():
        fits = pattern.endswith("/") == is_folder and fnmatch(name, pattern.rstrip("/"))
        if fits and pattern.count("/") - pattern.endswith("/") == name.count("/"):
            return mode
    return None


def faults(folder: Path, prefix: str) -> list[str]:
    """What about the files of a folder is not as the table says."""
    found = []
    for path in files_below(folder):
        about = path.lstat()
        if stat.S_ISLNK(about.st_mode):
            continue
        name = prefix + str(path.relative_to(folder)).removeprefix(".").join(["/", ""]).rstrip("/")
        mode = row_of(name, stat.S_ISDIR(about.st_mode))
        if mode is None:
            found.append(f"{name} is not in the table")
        elif stat.S_IMODE(about.st_mode) != mode or about.st_uid != os.geteuid():
            found.append(f"{name} has mode {stat.S_IMODE(about.st_mode):04o} and owner {about.st_uid}")
    return found


def private_folders() -> list[Path]:
    return list(Path(os.environ["XDG_RUNTIME_DIR"]).glob("rlm-*"))


def run_of(folder: Path) -> Path:
    (run,) = (folder / "runs").iterdir()
    return run


@pytest.mark.case("a01")
def test_under_umask_0_every_file_is_as_the_table_in_the_docs_says(tmp_path: Path) -> None:
    assert len(table()) > 25
    with umask(0), launch_script(tmp_path, WAIT="60") as job:
        job.wait_for("secrets arrived")
        (private,) = private_folders()
        assert faults(private, "PRIVATE") == []
        assert faults(run_of(tmp_path), "RUN") == []
        shared = [path.lstat() for path in Path("/dev/shm").glob(f"rlmesh-{about(private)['job_id']}-*")]
        assert {stat.S_IMODE(found.st_mode) for found in shared} <= {0o600}
        master = job.pid_of("prime_master")
        os.kill(master, signal.SIGKILL)
        job.wait_for(rf"the master \(pid {master}\) died")
        job.wait_for("master 2 of this job")
        os.kill(job.process.pid, signal.SIGINT)
        job.ended()
    assert faults(run_of(tmp_path), "RUN") == []
    assert stat.S_IMODE((tmp_path / "runs").stat().st_mode) == 0o700


def about(private: Path) -> dict[str, Any]:
    values: dict[str, Any] = json.loads((private / "n0" / "about.json").read_text())
    return values


@contextmanager
def launch_script(folder: Path, *options: str, **env: str) -> Iterator[Launched]:
    words = ["-m", "rlmesh.cli.main", "launch", "--view", "plain", *options, str(SCRIPT)]
    before = {name: os.environ.get(name) for name in env}
    os.environ.update(env)
    try:
        with Launched(words, folder) as job:
            yield job
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


@pytest.mark.case("a01")
def test_secrets_reach_the_members_and_nothing_that_is_read(tmp_path: Path) -> None:
    with launch_script(tmp_path, FAIL="1") as job:
        assert job.ended() == 1
    run = run_of(tmp_path)
    assert "secrets arrived" in job.output
    assert "postgres://me:***@db:5432/x" in job.output.partition("First cause")[2]
    described = json.loads((run / "job.json").read_text())
    assert described["global_env"]["HF_TOKEN"] == "***"
    assert described["workloads"]["STORE"]["envs"]["MY_PASSWORD"] == "***"
    assert described["user_config"]["max_tokens"] == 512
    assert described["user_config"]["nested"] == [{"client_secret": "***"}]
    status = subprocess.run(
        [sys.executable, "-m", "rlmesh.cli.main", "status", str(run)], capture_output=True, text=True, cwd=ROOT
    )
    assert "cannot connect to postgres://me:***@db:5432/x" in status.stdout
    assert REAL.findall(status.stdout + status.stderr) == []
    told = [path for path in run.rglob("*") if path.is_file() and path.parent.name != "logs"]
    assert {path.name for path in told} >= {"job.json", "events.jsonl", "end.json", "0001-TRAINER-0.json"}
    readable = [path for path in told if path.name != "state.db"]
    assert [str(path) for path in readable if REAL.search(path.read_bytes().decode("latin-1"))] == []
    assert SECRETS


@pytest.mark.case("a01")
@pytest.mark.slow
def test_a_run_is_opened_to_a_group_on_purpose(tmp_path: Path) -> None:
    with umask(0), launch_script(tmp_path, **{SHARE_WITH_GROUP: str(os.getegid())}) as job:
        assert job.ended() == 0, job.output
    run = run_of(tmp_path)
    modes = {str(path.relative_to(run)): stat.S_IMODE(path.lstat().st_mode) for path in files_below(run)}
    assert modes["."] == modes["logs"] == 0o2750
    assert modes["job.json"] == modes["metrics.jsonl"] == modes["logs/TRAINER-0.log"] == 0o640
    assert modes["state.db"] == 0o600
    assert not [name for name, mode in modes.items() if mode & 0o027]


def test_a_group_that_does_not_exist_is_told_before_anything_starts(tmp_path: Path) -> None:
    with launch_script(tmp_path, **{SHARE_WITH_GROUP: "nobody-knows-it"}) as job:
        assert job.ended() == 1
    assert f"{SHARE_WITH_GROUP}=nobody-knows-it: there is no such group" in job.output
    assert "started, run directory" not in job.output


# Another user writes into the run directory


class Payload:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.touch, (self.path,))


def forge(path: Path, mark: Path) -> None:
    """A store in which every record is a pickle that makes a file where it is loaded."""
    payload = pickle.dumps(Payload(mark))
    with closing(sqlite3.connect(path)) as db:
        for table_name in ("job", "nodes", "members", "failures", "orders"):
            db.execute(f"UPDATE {table_name} SET data = ?", (payload,))
        db.execute("INSERT OR REPLACE INTO job VALUES ('graph', '', ?)", (payload,))
        db.commit()


@pytest.fixture(scope="module")
def ended_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ended")
    with launch(folder) as job:
        assert job.ended() == 0, job.output
    return run_of(folder)


def forged_journal(run: Path, mark: Path, folder: Path) -> None:
    """A write-ahead log that puts pickles into the run's state, as somebody makes it who may write to the folder."""
    work = folder / "work.db"
    shutil.copy(run / "state.db", work)
    with closing(sqlite3.connect(work)) as db:
        db.execute("PRAGMA journal_mode=wal")
        db.execute("PRAGMA wal_autocheckpoint=0")
        payload = pickle.dumps(Payload(mark))
        db.execute("INSERT OR REPLACE INTO job VALUES ('graph', '', ?)", (payload,))
        db.commit()
        shutil.copy(work, run / "state.db")
        shutil.copy(f"{work}-wal", run / "state.db-wal")
    os.chmod(run / "state.db", 0o600)


@pytest.mark.case("a02")
@pytest.mark.parametrize("whose", ["mine", pytest.param("the stranger's", marks=as_root)])
def test_a_forged_journal_is_not_believed(whose: str, ended_run: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(ended_run, run)
    os.chmod(run, 0o700)
    forged_journal(run, tmp_path / "owned", tmp_path)
    if whose == "mine":
        os.chmod(run / "state.db-wal", 0o600)
        says = r"the graph of calls of .* cannot be read from state\.db: a record of CallGraph is not a text but bytes"
    else:
        os.chown(run / "state.db-wal", STRANGER, STRANGER)
        says = rf"state in .* is not used.*state\.db-wal belongs to uid {STRANGER}, not to you"
    with pytest.raises(UsageError, match=says):
        last_graph(run)
    if whose != "mine":
        os.chmod(run, 0o777)
        with pytest.raises(UsageError, match="has mode 0777, so others can put files there: chmod -R go-w"):
            last_graph(run)
    assert not (tmp_path / "owned").exists()


@pytest.mark.case("a03")
@pytest.mark.parametrize("whose", ["mine", pytest.param("the stranger's", marks=[as_root, pytest.mark.slow])])
def test_a_replaced_state_of_a_running_job_ends_it_and_runs_nothing(
    whose: str, tmp_path: Path, own_time: OwnTime
) -> None:
    mark = tmp_path / "owned"
    with launch(tmp_path, "--sleep", "60") as job:
        job.wait_for("step 1")
        run = run_of(tmp_path)
        forged = tmp_path / "forged.db"
        with closing(sqlite3.connect(run / "state.db")) as source, closing(sqlite3.connect(forged)) as copy:
            source.backup(copy)
        forge(forged, mark)
        os.chmod(forged, 0o600)
        if whose != "mine":
            os.chown(forged, STRANGER, STRANGER)
        master = job.pid_of("prime_master")
        os.kill(master, signal.SIGSTOP)
        for suffix in ("-wal", "-shm"):
            Path(f"{run}/state.db{suffix}").unlink(missing_ok=True)
        os.replace(forged, run / "state.db")
        os.kill(master, signal.SIGKILL)
        began = time.monotonic()
        assert job.ended() == 1, job.output
        assert own_time.since(began) < 20.0
    assert "the master refused the job's state" in job.output
    why = "is not a text but bytes" if whose == "mine" else f"belongs to uid {STRANGER}, not to you"
    assert why in job.output
    assert not mark.exists()


@pytest.mark.case("a02")
def test_a_job_is_not_resumed_over_a_state_of_pickles(ended_run: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(ended_run, run)
    with closing(sqlite3.connect(run / "state.db")) as db:
        db.execute(f"PRAGMA user_version = {OF_PICKLES}")
    with Launched(["-m", "rlmesh.cli.main", "launch", "--run-dir", str(run), str(TOY)], tmp_path) as job:
        assert job.ended() == 1
    assert "was written by rlmesh 0.1 as pickles, which can run code" in job.output
    assert f"rm {run}/state.db*" in job.output and "--run-dir" in job.output
    assert "step 0" not in job.output


PLANTS: dict[str, tuple[str, Callable[[Path, Path], object], str]] = {
    "link to a file": (
        "events.jsonl",
        lambda path, victim: path.symlink_to(victim),
        "is a link, which is not followed",
    ),
    "link in logs": ("logs/TRAINER-0.log", lambda path, victim: path.symlink_to(victim), "is a link"),
    "link of a folder": ("incidents", lambda path, victim: path.symlink_to(victim.parent), "is a link"),
    "pipe": ("starts.json", lambda path, victim: os.mkfifo(path), "is no regular file"),
    "pipe in logs": ("logs/master.log", lambda path, victim: os.mkfifo(path), "is no regular file"),
    "device": (
        "held-by.json",
        lambda path, victim: os.mknod(path, 0o600 | stat.S_IFCHR, os.makedev(1, 3)),
        "is no reg",
    ),
    "hard link": ("metrics.jsonl", lambda path, victim: os.link(victim, path), "has 2 names (hard links)"),
    "folder": ("end.json", lambda path, victim: path.mkdir(), "is no regular file"),
}


@pytest.mark.case("a12")
@pytest.mark.parametrize("what", PLANTS)
def test_what_is_planted_in_a_run_directory_is_refused_before_anything_starts(what: str, tmp_path: Path) -> None:
    name, plant, says = PLANTS[what]
    victim = tmp_path / "elsewhere" / "victim"
    victim.parent.mkdir()
    victim.write_text("untouched")
    run = tmp_path / "run"
    (run / "logs").mkdir(parents=True, mode=0o700)
    try:
        plant(run / name, victim)
    except PermissionError:
        pytest.skip("only root can make a device")
    with Launched(["-m", "rlmesh.cli.main", "launch", "--run-dir", "run", str(TOY)], tmp_path) as job:
        assert job.ended() == 1
    assert f"run/{name} {says}" in job.output
    assert "step 0" not in job.output
    assert victim.read_text() == "untouched"
    assert list(victim.parent.iterdir()) == [victim]


@pytest.mark.case("a12")
def test_a_run_directory_that_others_may_write_to(tmp_path: Path) -> None:
    empty, full = tmp_path / "empty", tmp_path / "full"
    for folder in (empty, full):
        folder.mkdir()
        folder.chmod(0o777)
    (full / "notes.txt").touch()
    words = ["-m", "rlmesh.cli.main", "launch", "--view", "plain"]
    with Launched([*words, "--run-dir", "empty", str(TOY)], tmp_path) as job:
        assert job.ended() == 0, job.output
    assert stat.S_IMODE(empty.stat().st_mode) == 0o700
    with Launched([*words, "--run-dir", "full", str(TOY)], tmp_path) as job:
        assert job.ended() == 1
    assert f"{full} has mode 0777, so others can put files there: chmod -R go-w {full}" in job.output
    assert list(full.iterdir()) == [full / "notes.txt"]


class Quiet:
    def run(self) -> None: ...


@pytest.mark.case("b03")
def test_a_description_with_any_values_is_written() -> None:
    config = {"half \ud83d": "of \ud83d", "loss": math.nan, "url": "mysql://me:pw@h"}
    job = DLJobBuilder().config(config).role("TRAINER").run(Quiet).restart("member", window_s=math.inf).build()
    text = described(job)
    text.encode()
    found = json.loads(text)["user_config"]
    assert found == {"half \ud83d": "of \ud83d", "loss": "nan", "url": "mysql://me:***@h"}
