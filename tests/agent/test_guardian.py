"""Nothing is left behind, whoever is killed: real processes, real signals."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rlmesh.private_files import files_in
from tests.agent.processes import GUARDIAN, guardian_run, start_guardian, wait_gone
from tests.own_time import HANG_S, OwnTime

WAIT_FOR_DRIVER = "sys.stdin.read(); sys.exit(3)"
IGNORE_EVERYTHING = "signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(1000)"


@pytest.fixture
def bystander() -> Iterator[subprocess.Popen[bytes]]:
    """A process that is none of the guardian's: it must survive everything."""
    process = subprocess.Popen(["sleep", "2000"], start_new_session=True)
    yield process
    assert process.poll() is None
    process.kill()
    process.wait(HANG_S)


@pytest.fixture
def job_id() -> str:
    return f"test{os.getpid()}{time.monotonic_ns()}"


def finish(process: subprocess.Popen[bytes]) -> dict[str, Any]:
    output, _ = process.communicate(timeout=HANG_S)
    report: dict[str, Any] = json.loads(output)
    return report


def shared_memory(job_id: str) -> list[str]:
    return [name for name in os.listdir("/dev/shm") if job_id in name]


def what_ended(report: dict[str, Any]) -> str:
    assert all(item["removed"] for item in report["leftovers"]), report
    return " ".join(item["what"] for item in report["leftovers"] if item["kind"] == "process")


@pytest.mark.usefixtures("bystander")
def test_killed_agent_leaves_no_daemon_no_segment_and_no_socket(tmp_path: Path, job_id: str, own_time: OwnTime) -> None:
    guardian, fifo = start_guardian(tmp_path, job_id, IGNORE_EVERYTHING)
    pids = fifo.read_json()
    for each in ("daemon", "child"):  # they may be about to become what they are
        while Path(f"/proc/{pids[each]}/comm").read_text() != "sleep\n":
            time.sleep(0.001)
    os.kill(pids["agent"], signal.SIGKILL)
    began = time.monotonic()
    report = finish(guardian)
    assert own_time.since(began) < 5.0
    assert wait_gone(pids.values(), 0) == []
    assert report["agent_code"] == -9
    assert guardian.returncode == 128 + 9
    assert f"pid {pids['daemon']} (sleep)" in what_ended(report)
    assert f"pid {pids['child']} (sleep)" in what_ended(report)
    assert shared_memory(job_id) == []
    assert not (tmp_path / "sockets").exists()
    assert json.loads((tmp_path / "run" / "exit-node0.json").read_text()) == report


@pytest.mark.usefixtures("bystander")
@pytest.mark.parametrize("agent", [WAIT_FOR_DRIVER, IGNORE_EVERYTHING])
def test_killed_driver_takes_all_with_it(tmp_path: Path, job_id: str, agent: str) -> None:
    command, line, fifo = guardian_run(tmp_path, job_id, agent, grace_s=60.0)
    # The driver forks a child that holds the pipe too: end of file alone would never come.
    code = (
        "import os, subprocess, sys, time\n"
        f"p = subprocess.Popen({command!r}, stdin=subprocess.PIPE, start_new_session=True)\n"
        f"p.stdin.write({line!r}); p.stdin.flush()\n"
        "if os.fork() == 0: time.sleep(30); os._exit(0)\n"
        "time.sleep(1000)\n"
    )
    driver = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.DEVNULL, start_new_session=True)
    pids = fifo.read_json()
    driver.kill()
    driver.wait(HANG_S)
    left = wait_gone(pids.values(), 20.0)
    os.killpg(driver.pid, signal.SIGKILL)
    assert left == []
    assert shared_memory(job_id) == []
    assert not (tmp_path / "sockets").exists()
    assert json.loads((tmp_path / "run" / "exit-node0.json").read_text())["why"] == "the driver is gone"


def test_a_driver_that_is_killed_as_soon_as_it_has_written_leaves_no_folder(tmp_path: Path, job_id: str) -> None:
    command, line, fifo = guardian_run(tmp_path, job_id, WAIT_FOR_DRIVER)
    code = (
        "import os, sys; from rlmesh.agent.processes.guardian import Guardian\n"
        "parents = iter([os.getppid()]); os.getppid = lambda: next(parents, 1)\n"  # gone after the first look
        "sys.exit(Guardian(sys.argv[1:]).main())\n"
    )
    subprocess.run([sys.executable, "-c", code, *command[len(GUARDIAN) :]], input=line, check=False, timeout=10)
    assert wait_gone(fifo.read_json().values(), 0) == []
    assert not (tmp_path / "sockets").exists() and shared_memory(job_id) == []


def refused(call: str, error: str, command: list[str], line: bytes) -> subprocess.CompletedProcess[bytes]:
    """Run a guardian in which a system call raises an error."""
    code = (
        "import fcntl, os, sys; from rlmesh.agent.processes.guardian import Guardian\n"
        f"def refuse(*args): raise {error}\n"
        f"{call} = refuse\n"
        "sys.exit(Guardian(sys.argv[1:]).main())\n"
    )
    words = [sys.executable, "-c", code, *command[len(GUARDIAN) :]]
    return subprocess.run(words, input=line, stdout=subprocess.PIPE, timeout=HANG_S)


@pytest.mark.parametrize("size_bytes", [100, 200_000], ids=["fits", "does not"])
def test_a_user_with_too_many_pipes_gets_small_ones(tmp_path: Path, job_id: str, size_bytes: int) -> None:
    command, line, fifo = guardian_run(tmp_path, job_id, "sys.exit(3)", more="x" * size_bytes)
    done = refused("fcntl.fcntl", "PermissionError(1, 'Operation not permitted')", command, line)
    if size_bytes == 100:
        assert wait_gone(fifo.read_json().values(), 0) == [] and done.returncode == 3
    else:
        assert "does not fit into a pipe: this user has too many" in json.loads(done.stdout)["why"]
        fifo.close()


def test_an_agent_that_cannot_be_forked_is_told(tmp_path: Path, job_id: str) -> None:
    command, line, fifo = guardian_run(tmp_path, job_id, "sys.exit(3)")
    done = refused("os.fork", "BlockingIOError(11, 'Resource temporarily unavailable')", command, line)
    assert done.returncode == 1 and not (tmp_path / "sockets").exists()
    assert "the agent could not be started: BlockingIOError" in json.loads(done.stdout)["why"]
    fifo.close()


def test_end_of_standard_input_ends_the_agent_and_its_code_is_passed_on(tmp_path: Path, job_id: str) -> None:
    guardian, fifo = start_guardian(tmp_path, job_id, WAIT_FOR_DRIVER)
    pids = fifo.read_json()
    report = finish(guardian)  # closes its standard input
    assert wait_gone(pids.values(), 0) == []
    assert (report["why"], report["agent_code"], guardian.returncode) == ("the driver is gone", 3, 3)


def test_end_of_the_thread_that_started_the_guardian_ends_nothing(tmp_path: Path, job_id: str) -> None:
    import threading

    started: list[Any] = []
    thread = threading.Thread(target=lambda: started.append(start_guardian(tmp_path, job_id, WAIT_FOR_DRIVER)))
    thread.start()
    thread.join()
    guardian, fifo = started[0]
    pids = fifo.read_json()
    assert wait_gone(pids.values(), 0.1) == list(pids.values())
    assert finish(guardian)["agent_code"] == 3


def test_sigterm_gives_the_agent_its_grace(tmp_path: Path, job_id: str) -> None:
    guardian, fifo = start_guardian(tmp_path, job_id, WAIT_FOR_DRIVER)
    fifo.read_json()
    guardian.terminate()
    guardian.wait(HANG_S)
    report = finish(guardian)
    assert (report["why"], guardian.returncode) == ("SIGTERM", 3)


def test_last_line_of_the_agent_is_part_of_the_report(tmp_path: Path, job_id: str) -> None:
    says = 'print(json.dumps({"processes_started": 7})); sys.exit(0)'
    guardian, fifo = start_guardian(tmp_path, job_id, says)
    fifo.read_json()
    guardian.wait(HANG_S)
    assert finish(guardian)["agent"] == {"processes_started": 7}


def test_segments_and_sockets_of_another_node_on_this_machine_stay(tmp_path: Path, job_id: str) -> None:
    from rlmesh.agent.processes import ownership

    mine, other = (Path(f"/dev/shm/rlmesh-{job_id}-n{rank}-a") for rank in (0, 1))
    mine.touch()
    other.touch()
    held = ownership.hold_folder(str(tmp_path))
    first = ownership.hold_folder(str(tmp_path))
    try:
        assert ownership.remove_shared_memory(job_id, 0) == [(mine.name, True)]
        assert other.exists()
        assert ownership.remove_folder(str(tmp_path), first)
        assert tmp_path.exists()
        assert ownership.remove_folder(str(tmp_path), held)
        assert not tmp_path.exists()
    finally:
        other.unlink()


def test_a_draft_of_the_job_file_goes_with_it(tmp_path: Path) -> None:
    """A driver that is killed while it describes the job leaves one, which may have secrets in it."""
    from rlmesh.agent.processes import ownership

    folder = tmp_path / "rlm-x"
    folder.mkdir()
    job, draft, node = folder / "job", folder / ".job.17-4711", folder / "n1"
    for path in (job, draft, node):
        path.touch()
    ownership.remove_job_file(str(job), str(folder / "n0"))
    assert job.exists() and draft.exists(), "another node is left"
    node.unlink()
    ownership.remove_job_file(str(job), str(folder / "n0"))
    assert not folder.exists()


@pytest.mark.case("a11")
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make files of another user")
def test_segments_that_another_user_planted_are_nobodys_leavings(job_id: str) -> None:
    from rlmesh.agent.processes import ownership

    planted = Path(f"/dev/shm/rlmesh-{job_id}-n0-x")
    planted.touch()
    try:
        os.chown(planted, 65534, 65534)
        assert ownership.remove_shared_memory(job_id, 0) == []
        assert files_in(Path("/dev/shm"), f"rlmesh-{job_id}-*", anybodys=True) == []
    finally:
        planted.unlink()


@pytest.mark.parametrize("line", [b"", b"not json\n", b'{"half'])
def test_bad_configuration_is_reported(line: bytes) -> None:
    done = subprocess.run(GUARDIAN, input=line, capture_output=True, timeout=10)
    assert done.returncode == 1
    assert json.loads(done.stdout)["leftovers"] == []
    assert "configuration" in json.loads(done.stdout)["why"]


def test_a_command_that_does_not_exist_ends_with_127(tmp_path: Path, job_id: str) -> None:
    (tmp_path / "sockets").mkdir()
    config = {
        "job_id": job_id,
        "node_rank": 0,
        "run_dir": str(tmp_path),
        "socket_dir": str(tmp_path / "sockets"),
    }
    done = subprocess.run(
        [*GUARDIAN, "/no/such/python"],
        input=json.dumps(config).encode() + b"\n",
        capture_output=True,
        timeout=10,
    )
    assert done.returncode == 127
    assert "/no/such/python" in (tmp_path / "logs" / "agent-0.log").read_text()
