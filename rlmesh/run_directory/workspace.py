"""The folders and the secret of one start of a job: made by the driver, removed by the driver and the guardians."""

from __future__ import annotations

import json
import os
import pickle
import pwd
import secrets
import shutil
import tempfile
import time
from dataclasses import dataclass, replace
from fnmatch import fnmatch
from pathlib import Path

from rlmesh import private_files
from rlmesh.agent.processes import ownership
from rlmesh.agent.protocol import AgentConfig
from rlmesh.errors import LaunchError
from rlmesh.master.jobspec import JobSpec
from rlmesh.private_files import UnsafeFile
from rlmesh.runtime.connections.security import make_key, write_key_file
from rlmesh.runtime.process import clock
from rlmesh.runtime.transport.base import local_address

JOB_FILE = "job"
"""File in a socket folder, empty until the job is described: the sign of a socket folder."""
ABOUT_FILE, KEY_FILE = "about.json", "key"
"""Files in the socket folder of node 0, which only its owner can enter; ``rlmesh ps`` needs them to find and ask a
job."""
LOGIN_FOLDERS, LINGERING = "/run/user/", "/var/lib/systemd/linger"
SOCKET_PATH_LIMIT = 90
"""Maximum bytes of a socket folder's path: the system allows 107 for a socket's path, including its own name."""
RUN_FOLDERS = ("logs", "incidents", "timeline", "tensorboard", "samples", "trackers")
RUN_FILES = (
    "settings.pickle", "evaluation.json", "state.*", "metrics.*", "events.jsonl", "chaos.jsonl", "job.json",
    "starts.json", "end.json", "held-by.json", "exit-node*.json", "stacks-*.txt", "report.png", "relaunch.log",
    "progress.json", "reward-alarm-*.json", "ledger.sqlite*",
)  # fmt: skip
"""File names that rlmesh uses in a run directory; others belong to the directory's owner."""


class Hold:
    """The sign that a process needs a socket folder; it lasts until `release` or the end of the process.

    `running_jobs` removes a folder that nobody holds: its maker was killed before a guardian began.
    """

    def __init__(self, folder: Path) -> None:
        self._fd = ownership.hold_folder(str(folder))

    def release(self) -> None:
        """Give the folder up. May be called twice."""
        fd, self._fd = self._fd, None
        if fd is not None:
            os.close(fd)


@dataclass(frozen=True, slots=True)
class Workspace:
    """The folders of one job. ``run_dir`` stays; ``socket_dir`` (mode 0700) has one folder per node and is removed."""

    job_id: str
    run_dir: Path
    socket_dir: Path
    hold: Hold
    key: bytes

    @classmethod
    def create(cls, job_name: str, run_dir: Path | None, run_root: Path | None, key: bytes | None = None) -> Workspace:
        """Make the folders; without ``run_dir`` a new one in ``run_root`` (default ``runs``).

        Raises:
            LaunchError: a folder cannot be made; says which and why.
        """
        stamp = f"{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}"
        folder = run_dir or (run_root or Path("runs")) / f"{job_name}-{stamp}"
        try:
            folder = Path(os.path.abspath(folder))  # fails where the working directory is gone
            make_run_folder(folder)
        except UnsafeFile as error:
            raise LaunchError(f"the run directory is not used, since others could change what the job writes: {error}, "
                              "or name another one by --run-dir") from None  # fmt: skip
        except (OSError, ValueError) as error:  # ValueError: a zero byte
            raise LaunchError(f"the run directory {folder} cannot be made: {error}") from error
        job_id = f"{job_name[:40]}-{secrets.token_hex(4)}"
        return cls(job_id, folder, *_make_socket_dir(), key or make_key())

    @property
    def master_endpoint(self) -> str:
        return local_address(self.node_dir(0), "master")

    @property
    def job_path(self) -> Path:
        return self.socket_dir / JOB_FILE

    def node_dir(self, node_rank: int) -> Path:
        """Return the socket folder of one node, removed by its guardian."""
        return self.socket_dir / f"n{node_rank}"

    def write_job(self, spec: JobSpec, nodes: int) -> None:
        """Make the socket folders of this machine's nodes; write the job file for the master, and the files for
        discovery."""
        for node_rank in range(nodes):
            private_files.make_folder(self.node_dir(node_rank), secret=True)
        _write_about(
            self.node_dir(0), self.key, self.job_id, spec.job_name, spec.run_dir, self.master_endpoint,
            spec.submitted_at,
        )  # fmt: skip
        private_files.write_whole(self.job_path, pickle.dumps(spec), secret=True, durable=False)

    def remove_sockets(self) -> None:
        """Remove the socket folder with all its content."""
        shutil.rmtree(self.socket_dir, ignore_errors=True)
        self.hold.release()


@dataclass(frozen=True, slots=True)
class NodeFolder:
    """The socket folder of a node that joined a job, made on that node and removed by its guardian."""

    config: AgentConfig
    folder: Path
    hold: Hold

    @classmethod
    def create(cls, config: AgentConfig) -> NodeFolder:
        """Make the folder and return its configuration; ``rlmesh ps`` finds the job on this node too.

        Raises:
            LaunchError: it cannot be made, or the run directory cannot.
        """
        folder, hold = _make_socket_dir()
        node = folder / f"n{config.node_rank}"
        try:
            private_files.make_folder(node, secret=True)
            _write_about(
                node, bytes.fromhex(config.key_hex), config.job_id, config.job_name, config.run_dir,
                config.master_endpoint, config.submitted_at,
            )  # fmt: skip
            make_run_folder(Path(config.run_dir))
        except OSError as error:
            shutil.rmtree(folder, ignore_errors=True)
            hold.release()
            raise LaunchError(
                f"node {config.node_name} cannot make {error.filename}: {error.strerror}. The run directory of a job "
                "of several nodes must be one that each of them can make: name one by --run-dir"
            ) from None
        return cls(replace(config, socket_dir=str(node), job_path=str(folder / JOB_FILE)), folder, hold)

    def remove(self) -> None:
        """Remove the folder; its guardian removes it too."""
        shutil.rmtree(self.folder, ignore_errors=True)
        self.hold.release()


def socket_bases() -> tuple[str, ...]:
    """Return the folders that may hold socket folders, in the order in which they are tried.

    A job may outlive the login that started it, and the system removes the login's runtime folder unless the user
    lingers.
    """
    runtime, others = os.environ.get("XDG_RUNTIME_DIR"), (tempfile.gettempdir(), "/tmp")
    if runtime and runtime.startswith(LOGIN_FOLDERS) and not _lingers():
        return (*others, runtime)
    return tuple(filter(None, (runtime, *others)))


def _lingers() -> bool:
    """True if the user's processes outlive the last login, by ``loginctl enable-linger``."""
    try:
        return os.path.exists(os.path.join(LINGERING, pwd.getpwuid(os.getuid()).pw_name))
    except KeyError:
        return False


def _make_socket_dir() -> tuple[Path, Hold]:
    tried = []
    for base in socket_bases():
        if len(os.fsencode(base)) + len("/rlm-12345678") > SOCKET_PATH_LIMIT:
            continue
        try:
            return _held_folder(base)
        except OSError as error:
            tried.append(f"{base}: {error.strerror}")
    raise LaunchError(
        "no folder for the job's sockets could be made: set TMPDIR to a writable folder with a short path "
        f"({'; '.join(tried) or 'the paths of XDG_RUNTIME_DIR and TMPDIR are too long'})"
    )


def _held_folder(base: str) -> tuple[Path, Hold]:
    folder = Path(tempfile.mkdtemp(prefix="rlm-", dir=base))
    hold = Hold(folder)
    try:
        (folder / JOB_FILE).touch(0o600)  # after the hold: a folder with this sign that nobody holds is removed
    except OSError:  # a full disk
        shutil.rmtree(folder, ignore_errors=True)
        hold.release()
        raise
    return folder, hold


def _write_about(
    folder: Path, key: bytes, job_id: str, job_name: str, run_dir: str, master_endpoint: str, submitted_at: float
) -> None:
    """Write the files by which ``rlmesh ps`` finds and asks a job into a node's socket folder."""
    write_key_file(folder / KEY_FILE, key)
    about = {
        "job_id": job_id,
        "job_name": job_name,
        "run_dir": run_dir,
        "master_endpoint": master_endpoint,
        "started_at": submitted_at or clock.epoch(),
        "driver_pid": os.getpid(),
        "epoch": clock.epoch_here(),
    }
    private_files.write_whole(folder / ABOUT_FILE, json.dumps(about), secret=True, durable=False)


def make_run_folder(path: Path) -> None:
    """Make the run directory with its log folder, or check an existing one.

    An empty directory that others may write to is made private.

    Raises:
        UnsafeFile: it has files, and others may write to it, or it belongs to another user; or a name in it that the
            run uses is a link, a special file, or another user's file.
        OSError: it cannot be made.
    """
    if private_files.share_with():
        private_files.group_number(private_files.share_with())  # fails before a part of the folders is there
    if path.is_symlink() and not path.exists():
        raise UnsafeFile(path, "is a link to nothing: name the folder itself")
    if path.is_dir() and not any(path.iterdir()):
        private_files.make_private(path.resolve())
    private_files.make_folder(path)
    _refuse_planted(path)
    private_files.make_folder(path / "logs")


def _refuse_planted(run_dir: Path) -> None:
    for name in os.listdir(run_dir):
        path = run_dir / name
        if name in RUN_FOLDERS:
            if path.is_symlink():
                raise UnsafeFile(path, "is a link, which is not followed: remove it")
            private_files.check_folder(path)
            for inner in os.listdir(path):
                _refuse_odd(path / inner)
        elif any(fnmatch(name, pattern) for pattern in RUN_FILES):
            _refuse_odd(path)


def _refuse_odd(path: Path) -> None:
    try:
        private_files.refuse_odd(path)
    except FileNotFoundError:
        pass  # a temporary file of a node that has started already
