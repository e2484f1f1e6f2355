"""`CheckpointFolder`: checkpoints of an engine that are complete or absent.

The folder has the data of each checkpoint in a subfolder, and ``current.json``, which names the current checkpoint.
This file is replaced atomically when all ranks have written their data; only then older data are deleted. So it names a
complete checkpoint at any time, even after a kill. A checkpoint that another user can have written is not read unless
the caller allows it.

::

    current.json                  {"data": "step-00000020-5f2c91aa", "steps": 20, "kind": "torch", "ranks": 2,
                                   "files": {"__0_0.distcp": {"size_bytes": …, "sha256": …}, …}, …}
    step-00000020-5f2c91aa/       __0_0.distcp, __1_0.distcp, .metadata
"""

from __future__ import annotations

import json
import logging
import os
import secrets
import shutil
import threading
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

from rlmesh import private_files
from rlmesh.errors import UsageError
from rlmesh.rl.engines.training.checkpoint.checksums import FileSum, damage_of, sums_from
from rlmesh.rl.engines.training.checkpoint.ownership import (
    close_if_empty,
    fault_of,
    faults_in,
    keep_others_from_writing,
    refused,
)

log = logging.getLogger(__name__)

CURRENT = "current.json"
FORMAT = 1


@dataclass(frozen=True)
class Saved:
    """The content of ``current.json``.

    Attributes:
        data: name of the subfolder.
        steps: number of finished optimizer steps.
        kind: "torch": torch's distributed checkpoints, for any number of ranks; "deepspeed-zeroN": DeepSpeed's own.
        ranks: number of ranks that wrote it.
        files: the size and the checksum of each file of the data.
    """

    data: str
    steps: int
    kind: str
    ranks: int
    files: Mapping[str, FileSum] = field(default_factory=dict)
    format: int = FORMAT


class CheckpointFolder:
    """The checkpoints of an engine. All ranks write data; only rank 0 writes ``current.json``.

    Args:
        folder: the folder of the engine's checkpoints.
        trust_others: read files that other users own or can write to.
    """

    def __init__(self, folder: Path, *, trust_others: bool = False) -> None:
        self.folder = folder
        self.trust_others = trust_others

    def current(self) -> Saved:
        """The current checkpoint, which is complete.

        Raises:
            UsageError: there is none, another user can have written it, or a later version of this library wrote it.
        """
        path = self.folder / CURRENT
        try:
            if not self.trust_others:
                # The folder is checked first: if others cannot write to it, nobody replaces the file between check and
                # read.
                fault = fault_of(self.folder, self.folder.stat()) or fault_of(path, path.lstat())
                if fault:
                    raise refused(self.folder, fault)
            fields = json.loads(path.read_bytes())
        except FileNotFoundError:
            raise UsageError(f"{self.folder} holds no complete checkpoint: there is no {CURRENT}") from None
        except ValueError as error:
            raise UsageError(f"{path} is no JSON: {error}") from None
        if not isinstance(fields, dict) or fields.get("format") != FORMAT:
            found = fields.get("format") if isinstance(fields, dict) else type(fields).__name__
            raise UsageError(f"{path} has format {found!r}; this version reads {FORMAT}")
        try:
            saved = Saved(**{**fields, "files": sums_from(fields.get("files", {}))})
        except (TypeError, ValueError) as error:
            raise UsageError(f"{path} does not say what it should: {error}") from None
        if Path(str(saved.data)).name != saved.data:
            raise UsageError(f"{path} names data outside of its folder: {saved.data!r:.200}")
        return saved

    def data_of(self, saved: Saved) -> Path:
        return self.folder / saved.data

    def fault_in(self, saved: Saved) -> str:
        """The reason why the data of a checkpoint must not be loaded; empty if there is none."""
        if self.trust_others:
            return ""
        try:
            fault = faults_in(self.data_of(saved))
        except OSError as error:
            return f"the checkpoint in {self.folder} cannot be read: {error}"
        return str(refused(self.folder, fault)) if fault else ""

    def damage_in(self, saved: Saved, rank: int = 0, ranks: int = 1) -> str:
        """A text about the first file of a checkpoint that differs from what was written; empty if there is none.

        Args:
            rank, ranks: check only the files of this rank's share.
        """
        if damage := damage_of(self.data_of(saved), saved.files, sorted(saved.files)[rank::ranks]):
            return f"the checkpoint in {self.folder} is not loaded: {damage}"
        return ""

    def begin(self, steps: int) -> str:
        """Make a subfolder for new data; returns its name."""
        close_if_empty(self.folder)
        name = f"step-{steps:08d}-{secrets.token_hex(4)}"
        # Private whatever the umask, like new folders above it; the owner may give others access later.
        for folder in (self.folder, self.folder / name):
            if not folder.exists():
                private_files.make_folder(folder)
        if fault := fault_of(self.folder, self.folder.stat()):
            log.warning("%s. Checkpoints are saved there, and loaded with trust_others=True only", fault)
        return name

    def commit(self, saved: Saved) -> None:
        """Make this checkpoint the current one, and delete all others."""
        keep_others_from_writing(self.folder / saved.data)
        _sync(self.folder / saved.data)
        write_atomically(self.folder / CURRENT, json.dumps(asdict(saved), indent=2).encode() + b"\n")
        for other in self.folder.glob("step-*"):
            if other.name != saved.data:
                shutil.rmtree(other, ignore_errors=True)
        for draft in self.folder.glob(f".{CURRENT}.*.tmp"):  # left over from a process that was killed
            draft.unlink(missing_ok=True)


def write_atomically(path: Path, content: bytes) -> None:
    """Write a file so that, even after a crash, ``path`` is absent, the old file or the new file."""
    aside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(aside, "wb", opener=_private) as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        aside.replace(path)
    finally:
        aside.unlink(missing_ok=True)
    _sync(path.parent)


def _private(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)


def _sync(folder: Path) -> None:
    """Make the names in a folder durable."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class SavingThread:
    """Runs functions that write checkpoints, one at a time."""

    def __init__(self) -> None:
        self._last: Job | None = None

    def start(self, work: Callable[[], Path]) -> Job:
        self._last = Job(work)
        return self._last

    def wait(self) -> None:
        """Wait until the last job has ended; its errors are raised by `Job.result`."""
        if self._last is not None:
            self._last.thread.join()
            self._last = None


class Job:
    """A checkpoint that is being written; see `Saving`."""

    def __init__(self, work: Callable[[], Path]) -> None:
        self._work = work
        self._path: Path | None = None
        self._error: BaseException | None = None
        self.thread = threading.Thread(target=self._run, name="rlmesh-checkpoint", daemon=True)
        self.thread.start()

    def _run(self) -> None:
        try:
            self._path = self._work()
        except BaseException as error:
            self._error = error

    def done(self) -> bool:
        return not self.thread.is_alive()

    def result(self, timeout_s: float | None = None) -> Path:
        self.thread.join(timeout_s)
        if self.thread.is_alive():
            raise TimeoutError(f"the checkpoint is not written after {timeout_s} s; it goes on")
        if self._error is not None:
            raise self._error
        assert self._path is not None
        return self._path
