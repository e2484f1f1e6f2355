"""Discovery of this user's running jobs on this machine, by the folders of their sockets."""

from __future__ import annotations

import fcntl
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlmesh import private_files
from rlmesh.agent.processes import ownership
from rlmesh.errors import UsageError
from rlmesh.run_directory.workspace import ABOUT_FILE, JOB_FILE, KEY_FILE, socket_bases
from rlmesh.runtime.connections.security import load_key_file
from rlmesh.runtime.process import clock

_KINDS: dict[str, Any] = {
    "job_id": str, "job_name": str, "run_dir": str, "master_endpoint": str, "started_at": int | float,
    "driver_pid": int,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class RunningJob:
    """A job whose master is on this machine. Times are seconds since the epoch by the job's clock, which ``epoch``
    describes (for `clock.epoch_of`)."""

    job_id: str
    job_name: str
    run_dir: str
    master_endpoint: str
    started_at: float
    driver_pid: int
    folder: Path
    epoch: str = ""

    def age_s(self) -> float:
        """Return the job's age in seconds, independent of changes of the wall clock."""
        return max(0.0, clock.epoch_of(self.epoch) - self.started_at)

    def key(self) -> bytes:
        """Return the job's secret.

        Raises:
            UsageError: the key file is gone, because the job has ended, or others can read it.
        """
        path = self.folder / KEY_FILE
        if not path.exists():
            raise UsageError(f"job {self.job_id} has ended just now: `rlmesh status {self.run_dir}`")
        return load_key_file(path)


def running_jobs(bases: tuple[str, ...] | None = None) -> list[RunningJob]:
    """Return this user's running jobs, oldest first. Remains of jobs whose processes were all killed are removed."""
    found: dict[str, RunningJob] = {}
    for base in socket_bases() if bases is None else bases:
        for folder in _own_folders(base, "rlm-"):
            nodes = _own_folders(folder, "n")
            if not any(os.path.lexists(os.path.join(node, ABOUT_FILE)) for node in nodes):
                _remove_unheld(folder, nodes)
                continue
            for node in nodes:
                job = _read(Path(node) / ABOUT_FILE)
                if job is not None and not _swept(job):
                    found[job.job_id] = job
    return sorted(found.values(), key=lambda job: job.started_at)


def _own_folders(base: str, prefix: str) -> list[str]:
    """Return the real folders in ``base`` that belong to this user and are closed to others.

    ``base`` may be writable by everybody, so other entries are ignored.
    """
    found = []
    try:
        with os.scandir(base) as entries:
            for entry in entries:
                if entry.name.startswith(prefix) and entry.is_dir(follow_symlinks=False):
                    about = entry.stat(follow_symlinks=False)
                    if about.st_uid == os.geteuid() and not about.st_mode & 0o077:
                        found.append(entry.path)
    except OSError:
        pass  # there is no such folder, or the job has just ended
    return found


def _read(path: Path) -> RunningJob | None:
    try:
        about: dict[str, Any] = json.loads(private_files.read(path))
        job = RunningJob(folder=path.parent, **about)
    except (OSError, ValueError, TypeError):
        return None  # The job has just ended, or is of another version.
    return job if all(isinstance(about[name], kind) for name, kind in _KINDS.items()) else None


def _swept(job: RunningJob) -> bool:
    """Remove the remains of a job whose processes were all killed at once; True if they are removed.

    Usually one process outlives the others and cleans up.
    """
    rank = job.folder.name[1:]
    if not rank.isdigit() or _is_held(job.folder.parent) or ownership.marked(f"{job.job_id}/{rank}"):
        return False  # its maker, or a process of the node, lives
    held = ownership.hold_folder(str(job.folder))
    if held is None or not _alone(held):
        if held is not None:
            os.close(held)
        return False
    ownership.remove_shared_memory(job.job_id, int(rank))
    gone = ownership.remove_folder(str(job.folder), held)
    ownership.remove_job_file(str(job.folder.parent / "job"), str(job.folder))
    return gone


def _is_held(folder: Path) -> bool:
    """True if another process holds the folder, or if that cannot be known."""
    held = ownership.hold_folder(str(folder))
    if held is None:
        return True
    try:
        return not _alone(held)
    finally:
        os.close(held)


def _remove_unheld(folder: str, nodes: list[str]) -> None:
    """Remove a socket folder that no job has been described in, if neither its maker nor a guardian holds it.

    Folders of others may have such names too: one with anything else in it stays.
    """
    try:
        names = set(os.listdir(folder))
    except OSError:
        return
    if names != {JOB_FILE, *map(os.path.basename, nodes)}:
        return
    held = [fd for fd in map(ownership.hold_folder, (folder, *nodes)) if fd is not None]
    unheld = len(held) == len(nodes) + 1 and all(map(_alone, held))
    for fd in held[1:]:
        os.close(fd)
    if unheld:
        ownership.remove_folder(folder, held[0])
    elif held:
        os.close(held[0])


def _alone(held: int) -> bool:
    """True if no other process holds the folder."""
    try:
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def find_job(what: str | None, jobs: list[RunningJob] | None = None) -> RunningJob:
    """Return a job by its id, its name or its run directory; without any of them the only running one.

    Raises:
        UsageError: there is none, or more than one; names the running jobs.
    """
    running = running_jobs() if jobs is None else jobs
    if not running:
        raise UsageError("no job of yours runs on this machine")
    names = ", ".join(f"{job.job_id} ({job.run_dir})" for job in running)
    if what is None:
        matching = running
    else:
        folder = os.path.abspath(what)
        matching = [job for job in running if what in (job.job_id, job.job_name) or folder == job.run_dir]
    if len(matching) == 1:
        return matching[0]
    if matching:
        raise UsageError(f"{len(matching)} jobs run here; name one by its id or run directory: {names}")
    raise UsageError(f"no job {what!r} runs here; running: {names}")
