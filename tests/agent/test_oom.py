"""Memory that runs out is said so, with how much there was."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from rlmesh.agent.processes.oom import OomCounters
from tests.own_time import HANG_S

JOB = Path(__file__).with_name("oom_job.py")
ROOT = JOB.parents[2]
LIMIT_BYTES = 400 * 2**20


@pytest.mark.parametrize("version", [1, 2])
def test_kills_and_limits_of_memory_are_read_from_both_versions_of_cgroups(version: int, tmp_path: Path) -> None:
    proc, cgroups = tmp_path / "proc", tmp_path / "cgroup"
    group = cgroups / "memory/job" if version == 1 else cgroups / "job"
    (proc / "self").mkdir(parents=True)
    group.mkdir(parents=True)
    (proc / "self/cgroup").write_text("7:memory:/job\n" if version == 1 else "0::/job\n")
    (proc / "vmstat").write_text("pgfault 3\noom_kill 1\n")
    (proc / "meminfo").write_text("MemTotal:       2097152 kB\n")
    counter = group / ("memory.oom_control" if version == 1 else "memory.events")
    limit = group / ("memory.limit_in_bytes" if version == 1 else "memory.max")
    counter.write_text("under_oom 0\noom_kill 4\n")
    limit.write_text(f"{2**29}\n")
    counters = OomCounters(proc, cgroups)
    assert counters.look(2**20) == "", "what was before does not count"
    counter.write_text("under_oom 0\noom_kill 5\n")
    assert counters.look(2**28) == (
        f"out of memory: its peak was 256 MiB, and its control group {group} has a limit of 512 MiB"
    )
    assert counters.look(2**28) == ""
    (proc / "vmstat").write_text("oom_kill 2\n")
    assert counters.look(2**28) == "out of memory: its peak was 256 MiB, and the machine has 2,048 MiB"


@pytest.fixture
def small_group() -> Iterator[Path]:
    group = Path(f"/sys/fs/cgroup/memory/rlmesh-test-{os.getpid()}")
    try:
        group.mkdir()
        (group / "memory.limit_in_bytes").write_text(str(LIMIT_BYTES))
    except OSError as error:
        pytest.skip(f"control groups cannot be made here: {error}")
    yield group
    deadline = time.monotonic() + HANG_S
    while True:
        try:
            group.rmdir()
            return
        except OSError:  # its last process is being reaped
            assert time.monotonic() < deadline
            time.sleep(0.02)


def run_job(tmp_path: Path, *command: str) -> str:
    env = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'launcher'}"}
    launch = [sys.executable, "-m", "rlmesh.cli.main", "launch", "--view", "plain", str(JOB)]
    done = subprocess.run(
        [*command[:3], *launch, *command[3:]], cwd=tmp_path, env=env, timeout=60, text=True, check=False,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    assert done.returncode == 1, done.stdout
    return done.stdout.partition("First cause:")[2]


def test_the_kernel_ends_a_member(small_group: Path, tmp_path: Path) -> None:
    text = run_job(tmp_path, "sh", "-c", f'echo $$ > {small_group}/cgroup.procs && exec "$0" "$@"')
    assert "EATER:0 (pid" in text and "was killed by SIGKILL (out of memory: its peak was" in text, text
    assert f"its control group {small_group} has a limit of 400 MiB" in text


def test_an_allocation_beyond_a_limit_of_the_process_is_told_as_out_of_memory(tmp_path: Path) -> None:
    text = run_job(tmp_path, "env", "A=1", "B=1", "--", "limit")
    assert "EATER:0" in text and "MemoryError" in text
    assert "out of memory: RLIMIT_AS is 1,024 MiB; its peak was" in text, text


@pytest.mark.case("a13")
def test_a_process_near_its_limit_says_so() -> None:
    code = (
        "import resource, sys\n"
        "from pathlib import Path\n"
        "from rlmesh.agent.processes.oom import at_the_limit\n"
        "print(repr(at_the_limit()))\n"
        "resource.setrlimit(resource.RLIMIT_AS, (1 << 40, 1 << 40))\n"
        "print(repr(at_the_limit()))\n"
        "used = int(open('/proc/self/statm').read().split()[0]) * resource.getpagesize()\n"
        "resource.setrlimit(resource.RLIMIT_AS, (used + (8 << 20), used + (8 << 20)))\n"
        "print(at_the_limit())\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    free, far, near = done.stdout.splitlines()
    assert free == far == "''", done.stderr
    assert "MiB of address space, and RLIMIT_AS allows" in near
