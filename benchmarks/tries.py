"""Runs a small job for `kills.py` and `standstills.py`, finds its processes, and looks for what it has left."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from rlmesh.run_directory.discovery import running_jobs

HERE = Path(__file__).resolve().parent
JOB = HERE / "small_job.py"
MARK = "RLMESH_TRY"
GONE_S = 8.0
"""What is left of a job must be gone so long after its driver."""

T = TypeVar("T")
R = TypeVar("R")


@dataclass(frozen=True)
class Found:
    """A process of a job."""

    pid: int
    what: str


@dataclass
class Running:
    """A job under way; ``folder`` holds all that it writes."""

    mark: str
    folder: Path
    process: subprocess.Popen[bytes]
    began: float = field(default_factory=time.monotonic)

    def output(self) -> str:
        return (self.folder / "output").read_text(errors="replace")

    def processes(self) -> list[Found]:
        """All that carry the job's mark."""
        found = []
        for pid in map(int, filter(str.isdigit, os.listdir("/proc"))):
            try:
                environment = Path(f"/proc/{pid}/environ").read_bytes()
                if f"{MARK}={self.mark}\0".encode() in environment and state_of(pid) not in ("Z", "X"):
                    found.append(Found(pid, self._what(pid)))
            except OSError:
                continue
        return found

    def _what(self, pid: int) -> str:
        if pid == self.process.pid:
            return "driver"
        name = Path(f"/proc/{pid}/comm").read_text().strip()
        command = Path(f"/proc/{pid}/cmdline").read_text()
        if "guardian.py" in command:
            return "guardian"
        if "prime_master" in command:
            return "master"
        if name.startswith(("WORKER", "TRAINER")):
            return "worker"
        return {"rlmesh-zygote": "zygote", "rlmesh-agent": "agent"}.get(name, "")

    def wait(self, seconds: float) -> int | None:
        """The exit code; None if it still runs then."""
        try:
            return self.process.wait(max(0.0, seconds))
        except subprocess.TimeoutExpired:
            return None

    def left(self, *, looks: bool = False) -> list[str]:
        """What is still there ``GONE_S`` after the driver's end.

        ``looks``: the user looks at their jobs meanwhile. A driver that is killed before its job has other processes
        leaves its folder to that.
        """
        deadline = time.monotonic() + GONE_S
        while True:
            if looks:
                running_jobs((str(self.folder / "tmp"),))
            left = [f"process {found.pid} {found.what}" for found in self.processes()]
            left += [f"socket folder {path}" for path in self.folder.glob("tmp/rlm-*")]
            left += [f"shared memory {path}" for path in Path("/dev/shm").glob(f"rlmesh-{self.mark}-*")]
            if not left or time.monotonic() > deadline:
                return left
            time.sleep(0.05)


def state_of(pid: int) -> str:
    """The letter of a process's state."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


@contextmanager
def running(arguments: Iterable[str], environment: Mapping[str, str] | None = None) -> Iterator[Running]:
    """Start the job; at the end nothing of it runs any more, and its folder is removed."""
    folder = Path(tempfile.mkdtemp(prefix="rlt-"))
    (folder / "tmp").mkdir()
    mark = folder.name
    env = {**os.environ, MARK: mark, "TMPDIR": str(folder / "tmp"), "PYTHONUNBUFFERED": "1", **(environment or {})}
    env.pop("XDG_RUNTIME_DIR", None)
    with open(folder / "output", "wb") as output:
        process = subprocess.Popen(
            [sys.executable, str(JOB), *arguments], env=env, cwd=folder, stdin=subprocess.DEVNULL, stdout=output,
            stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
    job = Running(mark, folder, process)
    try:
        yield job
    finally:
        while found := job.processes():
            for each in found:
                try:
                    os.kill(each.pid, 9)
                except ProcessLookupError:
                    pass
            time.sleep(0.05)
        process.wait()
        shutil.rmtree(folder, ignore_errors=True)


def in_turn(work: Callable[[T], R], what: Iterable[T], at_once: int, told: Callable[[R], None]) -> list[R]:
    """Do work for each, some at once; each result is told when it is there."""
    results = []
    with ThreadPoolExecutor(at_once) as pool:
        for result in pool.map(work, what):
            told(result)
            results.append(result)
    return results
