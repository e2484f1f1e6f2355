"""Listening at a path that the user names, where anything may exist already: no file of others is removed."""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import stat
import struct
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

__all__ = ["ListenSocket", "why_taken"]

PATH_BYTES = 107
LOCK_S = 1.0
_KINDS = {
    stat.S_IFREG: "a file", stat.S_IFDIR: "a folder", stat.S_IFLNK: "a link", stat.S_IFIFO: "a named pipe",
}  # fmt: skip


def why_taken(path: Path) -> str:
    """The reason why this process must not listen at ``path``; empty if it may.

    It may if nothing exists there, or a socket of this user whose listener has ended.
    """
    if len(os.fsencode(path)) > PATH_BYTES:
        return f"the path has {len(os.fsencode(path))} bytes, and a socket's may have {PATH_BYTES}"
    try:
        found = os.lstat(path)
    except FileNotFoundError:
        if not path.parent.is_dir():
            return f"there is no folder {path.parent}"
        return "" if os.access(path.parent, os.W_OK | os.X_OK) else f"you may not write into {path.parent}"
    except OSError as error:
        return error.strerror or str(error)
    if not stat.S_ISSOCK(found.st_mode):
        return f"there is {_KINDS.get(stat.S_IFMT(found.st_mode), 'something')} at this path already, which stays"
    with socket.socket(socket.AF_UNIX) as probe:
        probe.setblocking(False)
        code = probe.connect_ex(os.fspath(path))
        if code == 0:
            pid = struct.unpack("3i", probe.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))[0]
            return f"another program (pid {pid}) listens there"
    if code == errno.ENOENT:
        return ""  # it has been removed meanwhile
    if code != errno.ECONNREFUSED:
        return f"another program listens there ({os.strerror(code)})"
    return "" if found.st_uid == os.getuid() else f"there is a socket of user {found.st_uid}, which stays"


class ListenSocket:
    """A socket bound at a path, open only to this user.

    Raises:
        OSError: the path is taken; see ``why_taken``.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        with _alone_in(path.parent):
            if why := why_taken(path):
                raise OSError(errno.EADDRINUSE, why)
            path.unlink(missing_ok=True)
            self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            before = os.umask(0o077)
            try:
                self.socket.bind(os.fspath(path))
                # Before the lock is released: until a socket listens, it looks like a dead one.
                self.socket.listen()
                self._identity = _identity(path)
            except OSError:
                self.socket.close()
                raise
            finally:
                os.umask(before)

    def remove(self) -> None:
        """Remove the socket's file, if it still is this socket's."""
        with _alone_in(self.path.parent):
            if _identity(self.path) == self._identity:
                self.path.unlink(missing_ok=True)


def _identity(path: Path) -> tuple[int, int] | None:
    try:
        found = os.lstat(path)
    except OSError:
        return None
    return found.st_dev, found.st_ino


@contextmanager
def _alone_in(folder: Path) -> Iterator[None]:
    """Keep other processes from checking and replacing a dead socket of this folder at the same moment.

    A lock that is held for long is not waited for: anybody may hold it, and binding fails if a file exists.
    """
    try:
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError:
        yield  # the work inside fails for the same reason, and says so
        return
    try:
        deadline = time.monotonic() + LOCK_S
        while time.monotonic() < deadline:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                time.sleep(0.01)
            except OSError:  # a file system without locks
                break
        yield
    finally:
        os.close(fd)
