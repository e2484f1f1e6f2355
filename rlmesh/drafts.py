"""Drafts: files and folders that a process writes under a temporary name in the folder of their target, then renames.

A process that is killed leaves its draft. So a draft's name tells its writer, and the next process that writes into
the folder removes the drafts whose writer is gone. The same holds for temporary folders (`scratch_folder`).

Standard library only: the guardian runs without site-packages.
"""

from __future__ import annotations

import binascii
import math
import os
import re
import stat
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import BinaryIO

    StrPath = str | os.PathLike[str]

__all__ = ["Draft", "draft_beside", "remove_drafts", "scratch_folder"]

STALE_S = 3600
"""Age at which a draft counts as left behind if its writer ran where this process cannot look, as on another host."""
_NOWHERE = "0-0"
_NAME = re.compile(r"\.(.+)\.([0-9]{1,10})-[0-9]+-([0-9a-f]+-[0-9a-f]+)\.(draft|scratch)", re.DOTALL)
"""A draft's name: the name that it is to get, the process id of its writer, where that runs, and what it is."""
_looked_in: dict[str, int] = {}
"""The folders in which a process has looked for drafts, and that process, since a forked one begins with a copy."""


class Draft:
    """A new file beside a path, which takes this path when the block ends, or is removed if the block raises.

    ``with Draft(path) as file:`` gives the new file, open for writing bytes. The folder may be open to others, who then
    can replace the file, but not have another one written.

    Args:
        mode: of the new file; the umask takes bits away.
    """

    def __init__(self, path: StrPath, mode: int = 0o666) -> None:
        self._path = os.fspath(path)
        self._mode = mode
        self._draft = draft_beside(self._path)

    def __enter__(self) -> BinaryIO:
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        self._file = os.fdopen(os.open(self._draft, flags, self._mode), "w+b")
        return self._file

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            self._file.close()
            if kind is None:
                os.replace(self._draft, self._path)
                remove_drafts(self._path)
        finally:
            try:
                os.unlink(self._draft)
            except OSError:
                pass  # it has taken its path


def draft_beside(path: StrPath) -> str:
    """A new name beside a path, for what this process writes before it takes this path."""
    return _beside(path, "draft")


def scratch_folder(name: str) -> str:
    """Make a private temporary folder; if this process dies before it removes it, the next that makes one does so."""
    import tempfile

    path = _beside(os.path.join(tempfile.gettempdir(), name), "scratch")
    os.mkdir(path, 0o700)
    remove_drafts(path)
    return path


def _beside(path: StrPath, kind: str) -> str:
    where, name = os.path.split(os.fspath(path))
    short = os.fsdecode(os.fsencode(name)[:160])  # the system's limit is 255
    return os.path.join(where, f".{short}.{os.getpid()}-{time.monotonic_ns()}-{_here()}.{kind}")


def _here() -> str:
    """The boot and the PID namespace of this process, within which a process id names one process at a time.

    The host's name is a part, since virtual machines that go on from one snapshot have the boot's id in common.
    """
    try:
        with open("/proc/sys/kernel/random/boot_id", "rb") as file:
            boot = file.read().decode().strip().replace("-", "")[:16]
        host = binascii.crc32(os.fsencode(os.uname().nodename))
        # Not kept for the next call: a forked process may be in another namespace.
        return f"{boot}{host:08x}-{os.stat('/proc/self/ns/pid').st_ino:x}"
    except OSError:
        return _NOWHERE


def remove_drafts(path: StrPath) -> None:
    """Remove what killed writers have left in the folder of a path that this process has just written.

    A process looks once into each folder. It removes this user's drafts whose writer is surely gone: its process id
    is of this boot and PID namespace, and free; or it ran elsewhere, and the draft has not changed for an hour by the
    clock of the file system. A draft that is to become a folder stays while no folder has this name, since it may be
    the only copy.
    """
    where, written = os.path.split(os.fspath(path))
    if _looked_in.get(where) == os.getpid():
        return
    _looked_in[where] = os.getpid()
    try:
        folder = os.open(where or ".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError:
        return  # this user may write into the folder, but not list it
    try:
        now, here = os.stat(written, dir_fd=folder).st_ctime, _here()
        names = set(os.listdir(folder))
        for name in names:
            if not (draft := _NAME.fullmatch(name)):
                continue
            target, pid, there, kind = draft.groups()
            folders = target in names or kind == "scratch"
            if there == here != _NOWHERE:
                if not _lives(int(pid)):
                    _remove(folder, name, math.inf, folders=folders)
            elif kind == "draft":  # nobody writes into a temporary folder all the time
                _remove(folder, name, now - STALE_S, folders=folders)
    except OSError:
        pass
    finally:
        os.close(folder)


def _lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except (OSError, OverflowError):  # a process of another user
        pass
    return True


def _remove(folder: int, name: str, until: float, *, folders: bool) -> None:
    """Remove a regular file of this user, or a folder, that has not changed since a time."""
    try:
        found = os.stat(name, dir_fd=folder, follow_symlinks=False)
        if found.st_uid != os.geteuid() or found.st_ctime > until:
            return
        if stat.S_ISREG(found.st_mode):
            os.unlink(name, dir_fd=folder)
        elif stat.S_ISDIR(found.st_mode) and folders and _newest(folder, name) <= until:
            import shutil

            shutil.rmtree(name, dir_fd=folder)
    except OSError:
        pass  # another process removes it, too


def _newest(folder: int, name: str) -> float:
    """Time of the last change in a folder."""
    return max(
        (
            os.stat(each, dir_fd=inside, follow_symlinks=False).st_ctime
            for _, folders, files, inside in os.fwalk(name, dir_fd=folder)
            for each in (*folders, *files)
        ),
        default=0.0,
    )
