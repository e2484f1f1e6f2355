"""Checkpoints that are whole or not there.

A folder holds the data of each checkpoint in a folder of its own, and ``current.json``, which names the one that
counts. It is replaced, atomically, when all ranks have written theirs; only then older data go. So whoever is killed,
whenever: ``current.json`` names a complete one. What somebody else can have written is not read, unless the reader says
that it may be.

::

    current.json                  {"data": "step-00000020-5f2c91aa", "steps": 20, "kind": "torch", "ranks": 2, …}
    step-00000020-5f2c91aa/       __0_0.distcp, __1_0.distcp, .metadata
"""

from __future__ import annotations

import json
import logging
import os
import secrets
import shutil
import threading
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from rlmesh.errors import UsageError
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
    """What ``current.json`` says.

    Attributes:
        data: name of the folder.
        steps: optimizer steps done.
        kind: "torch": torch's distributed checkpoints, for any number of ranks; "deepspeed-zeroN": DeepSpeed's own.
        ranks: how many wrote it.
    """

    data: str
    steps: int
    kind: str
    ranks: int
    format: int = FORMAT


class CheckpointFolder:
    """One engine's checkpoints. Only rank 0 writes here; the data are written by all ranks.

    Args:
        folder: of theirs.
        trust_others: read what other users own or can write to.
    """

    def __init__(self, folder: Path, *, trust_others: bool = False) -> None:
        self.folder = folder
        self.trust_others = trust_others

    def current(self) -> Saved:
        """The latest complete one.

        Raises:
            UsageError: there is none, somebody else can have written it, or a later version of this library wrote it.
        """
        path = self.folder / CURRENT
        try:
            if not self.trust_others:
                # The folder first: whoever cannot write there cannot put another file in place of the one looked at.
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
            saved = Saved(**fields)
        except TypeError as error:
            raise UsageError(f"{path} does not say what it should: {error}") from None
        if Path(str(saved.data)).name != saved.data:
            raise UsageError(f"{path} names data outside of its folder: {saved.data!r:.200}")
        return saved

    def data_of(self, saved: Saved) -> Path:
        return self.folder / saved.data

    def fault_in(self, saved: Saved) -> str:
        """Why the data of a checkpoint are not to be loaded; empty: they are."""
        if self.trust_others:
            return ""
        try:
            fault = faults_in(self.data_of(saved))
        except OSError as error:
            return f"the checkpoint in {self.folder} cannot be read: {error}"
        return str(refused(self.folder, fault)) if fault else ""

    def begin(self, steps: int) -> str:
        """Make a folder for new data; gives its name."""
        close_if_empty(self.folder)
        name = f"step-{steps:08d}-{secrets.token_hex(4)}"
        # Private, whatever the umask: what others may read is for their owner to say.
        for folder in (self.folder, self.folder / name):
            if not folder.exists():
                folder.mkdir(mode=0o700, parents=True)
                folder.chmod(0o700)
        if fault := fault_of(self.folder, self.folder.stat()):
            log.warning("%s. Checkpoints are saved there, and loaded with trust_others=True only", fault)
        return name

    def commit(self, saved: Saved) -> None:
        """From now on this one counts. What is left of others goes."""
        keep_others_from_writing(self.folder / saved.data)
        _sync(self.folder / saved.data)
        write_atomically(self.folder / CURRENT, json.dumps(asdict(saved), indent=2).encode() + b"\n")
        for other in self.folder.glob("step-*"):
            if other.name != saved.data:
                shutil.rmtree(other, ignore_errors=True)
        for draft in self.folder.glob(f".{CURRENT}.*.tmp"):  # of who was killed while writing it
            draft.unlink(missing_ok=True)


def write_atomically(path: Path, content: bytes) -> None:
    """So that ``path`` is, at any moment and after any crash, absent, the old one or the new one."""
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
    """Runs what writes a checkpoint, one at a time."""

    def __init__(self) -> None:
        self._last: Job | None = None

    def start(self, work: Callable[[], Path]) -> Job:
        self._last = Job(work)
        return self._last

    def wait(self) -> None:
        """Until the last one has ended, well or not: its owner is told of errors by `Job.result`."""
        if self._last is not None:
            self._last.thread.join()
            self._last = None


class Job:
    """One checkpoint that is being written; see `Saving`."""

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
