"""Files and folders of a run: made for their owner alone, and opened only where nobody else can have put them.

Everything that a run writes goes through here, and everything that is read back. A folder has mode 0700, a file 0600,
whatever the umask. A file is opened without following a link, only if it is a regular file with one name, belongs to
this user (or to root), and cannot be written by anybody else; its folder likewise. Anything else raises
:class:`UnsafeFile`, an ``OSError``, so that whoever can do without the file goes on without it.

A run is opened to a group on purpose by ``RLMESH_SHARE_WITH_GROUP=<group>`` in the environment of whoever submits the
job: its folders then have mode 2750 and that group, its files 0640. The socket folder, the job's key and the job's
state stay private.

Standard library only: the guardian runs without site-packages.
"""

from __future__ import annotations

import errno
import os
import stat
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from pathlib import Path

    StrPath = str | os.PathLike[str]

__all__ = [
    "SHARE_WITH_GROUP", "UnsafeFile", "append_to", "check_folder", "files_in", "group_number", "hold", "log_to",
    "make_folder", "make_private", "open_file", "read", "refuse_odd", "share_with", "write_whole",
]  # fmt: skip

SHARE_WITH_GROUP = "RLMESH_SHARE_WITH_GROUP"
"""Environment variable: the group that may read what a run leaves."""
FOLDER, FILE = 0o700, 0o600
SHARED_FOLDER, SHARED_FILE = 0o2750, 0o640
OTHERS_WRITE = 0o022
"""Whoever has one of these bits besides the owner can put a file in place of another."""
STALE_DRAFT_S = 3600.0
"""A draft of this age belongs to a process that was killed while it wrote."""


class UnsafeFile(PermissionError):
    """Somebody else may have put this file or folder there, or may change it."""

    def __init__(self, path: StrPath, why: str) -> None:
        super().__init__(errno.EPERM, why, os.fspath(path))

    def __str__(self) -> str:
        return f"{self.filename} {self.strerror}"

    def __reduce__(self) -> tuple[type[UnsafeFile], tuple[str, str]]:
        return UnsafeFile, (str(self.filename), str(self.strerror))


def share_with() -> str:
    """The group that may read the run; empty: nobody."""
    return os.environ.get(SHARE_WITH_GROUP, "")


def modes(*, secret: bool = False) -> tuple[int, int]:
    """Modes of new folders and files; ``secret``: also where the run is opened to a group."""
    return (SHARED_FOLDER, SHARED_FILE) if share_with() and not secret else (FOLDER, FILE)


def belongs_to_me(found: os.stat_result) -> bool:
    """Whether a file is this user's, or root's, who can do everything anyway."""
    return found.st_uid in (os.geteuid(), 0)


# Folders


def make_folder(path: StrPath, *, secret: bool = False) -> None:
    """Make a folder and those above it that are missing, all private; one that is there is checked.

    Raises:
        UnsafeFile: it is there, and is somebody else's, or others may write to it.
        OSError: it cannot be made.
    """
    path = os.path.abspath(path)
    missing = []
    while not os.path.isdir(path):
        missing.append(path)
        above = os.path.dirname(path)
        if above == path:
            break
        if os.path.lexists(path):
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), path)
        path = above
    if not missing:
        check_folder(path)
    for folder in reversed(missing):
        try:
            os.mkdir(folder, 0o700)
        except FileExistsError:
            if not os.path.isdir(folder):
                raise
            check_folder(folder)
            continue
        _open_folder_to(folder, secret=secret)


def _open_folder_to(folder: str, *, secret: bool) -> None:
    """Give a new folder its mode, which ``mkdir`` leaves to the umask, and its group."""
    mode, _ = modes(secret=secret)
    group = group_number(share_with()) if mode == SHARED_FOLDER else -1
    try:
        if group >= 0:
            os.chown(folder, -1, group, follow_symlinks=False)
        os.chmod(folder, mode)
    except OSError:
        if stat.S_IMODE(os.stat(folder).st_mode) & OTHERS_WRITE:
            raise  # a file system without modes is none of this user alone


def group_number(name: str) -> int:
    """The number of a group by its name or number.

    Raises:
        OSError: there is no such group.
    """
    if name.isdigit():
        return int(name)
    import grp

    try:
        return grp.getgrnam(name).gr_gid
    except KeyError:
        raise OSError(errno.EINVAL, f"{SHARE_WITH_GROUP}={name}: there is no such group") from None


def check_folder(path: StrPath) -> None:
    """Raise unless only this user can put files into a folder.

    Raises:
        UnsafeFile: it is somebody else's, or others may write to it; says what to do.
        OSError: it is not there, or no folder.
    """
    os.close(_folder(path))


def _folder(path: StrPath) -> int:
    folder = os.open(path or ".", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        found = os.fstat(folder)
        if not belongs_to_me(found):
            raise UnsafeFile(
                path, f"belongs to uid {found.st_uid}, not to you (uid {os.geteuid()}): name another folder"
            )
        if found.st_mode & OTHERS_WRITE:
            raise UnsafeFile(
                path, f"has mode {stat.S_IMODE(found.st_mode):04o}, so others can put files there: chmod -R go-w {path}"
            )
    except BaseException:
        os.close(folder)
        raise
    return folder


def make_private(path: StrPath) -> None:
    """Close a folder that is all ours, and that an earlier version or a generous umask left open to others' writing.
    One that is somebody else's stays as it is."""
    try:
        found = os.lstat(path)
        if stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid() and found.st_mode & OTHERS_WRITE:
            os.chmod(path, FOLDER)
    except OSError:
        pass  # not there


# Files


def open_file(path: StrPath, flags: int, *, secret: bool = False, neighbours: bool = False) -> int:
    """Open a file as ``os.open`` does, if it is safe to; a new one gets its mode whatever the umask.

    Args:
        path: of the file.
        flags: as for ``os.open``; links are never followed, and nothing is waited for.
        secret: private even if the run is opened to a group.
        neighbours: a link to another file of the same folder is followed (fused members share a log).

    Raises:
        UnsafeFile: it is a link or no regular file, or it or its folder is open to somebody else.
        OSError: it cannot be opened.
    """
    path = os.fspath(path)
    where, name = os.path.split(path)
    _, mode = modes(secret=secret)
    folder = _folder(where)
    try:
        if neighbours:
            name = _neighbour(name, folder)
        fd = os.open(
            name, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC, mode & 0o600, dir_fd=folder
        )
    except OSError as error:
        error.filename = path
        if error.errno == errno.ELOOP:
            raise UnsafeFile(path, "is a link, which is not followed: remove it") from None
        if error.errno == errno.ENXIO:  # a pipe without a reader
            raise UnsafeFile(path, "is no regular file: remove it") from None
        raise
    finally:
        os.close(folder)
    try:
        writes = bool(flags & (os.O_WRONLY | os.O_RDWR))
        _check_file(path, fd, writes)
        if writes:
            _set_mode(fd, mode)
        found = os.fstat(fd)
        if found.st_mode & OTHERS_WRITE:
            shown = stat.S_IMODE(found.st_mode)
            raise UnsafeFile(path, f"has mode {shown:04o}, so others can change it: chmod go-w {path}")
    except BaseException:
        os.close(fd)
        raise
    return fd


def refuse_odd(path: StrPath) -> None:
    """Raise unless a name stands for a regular file of this user with one name, or for a link to such a neighbour.

    Raises:
        UnsafeFile: it stands for something else, or its folder is open to others.
        OSError: it is not there.
    """
    path = os.fspath(path)
    where, name = os.path.split(path)
    folder = _folder(where)
    try:
        found = os.stat(name, dir_fd=folder, follow_symlinks=False)
        if stat.S_ISLNK(found.st_mode) and _neighbour(name, folder) != name:
            return
    finally:
        os.close(folder)
    if stat.S_ISLNK(found.st_mode):
        raise UnsafeFile(path, "is a link, which is not followed: remove it")
    _refuse_others(path, found, writes=True)


def _neighbour(name: str, folder: int) -> str:
    """The file of the same folder that a name is a link to, or the name itself."""
    try:
        if belongs_to_me(os.stat(name, dir_fd=folder, follow_symlinks=False)):
            target = os.readlink(name, dir_fd=folder)
            return name if os.sep in target else target
    except OSError:
        pass
    return name


def _check_file(path: str, fd: int, writes: bool) -> None:
    _refuse_others(path, os.fstat(fd), writes)


def _refuse_others(path: str, found: os.stat_result, writes: bool) -> None:
    if not stat.S_ISREG(found.st_mode):
        raise UnsafeFile(path, "is no regular file: remove it")
    if not belongs_to_me(found):
        raise UnsafeFile(path, f"belongs to uid {found.st_uid}, not to you (uid {os.geteuid()}): remove it")
    if writes and found.st_nlink > 1:
        raise UnsafeFile(path, f"has {found.st_nlink} names (hard links), so it may be another file: remove it")


def _set_mode(fd: int, mode: int) -> None:
    """The umask may have taken bits away, or an earlier version may have given too many."""
    found = os.fstat(fd)
    if stat.S_IMODE(found.st_mode) != mode and found.st_uid == os.geteuid():
        try:
            os.fchmod(fd, mode)
        except OSError:
            pass  # a file system without modes; whether others can write is checked next


def append_to(path: StrPath) -> int:
    """A descriptor that appends to a file of the run, which is made with its folders.

    Raises:
        UnsafeFile, OSError: as `open_file`.
    """
    make_folder(os.path.dirname(os.fspath(path)) or ".")
    return open_file(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)


def log_to(path: StrPath) -> int:
    """A descriptor that appends to a log; to nothing where a full disk has no room for a new file: whoever logs goes
    on without.

    Raises:
        UnsafeFile, OSError: as `open_file`, for any other reason.
    """
    try:
        return append_to(path)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        return os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)


def read(path: StrPath, most: int = -1) -> bytes:
    """The content of a file, at most ``most`` bytes of it.

    Raises:
        UnsafeFile, OSError: as `open_file`.
    """
    with os.fdopen(open_file(path, os.O_RDONLY), "rb") as file:
        return file.read(most)


def write_whole(path: StrPath, data: bytes | str, *, secret: bool = False, durable: bool = True) -> None:
    """Put a file there as a whole: after any death of the writer, and on a full disk, the old one or the new one is
    there, never a part. Characters that UTF-8 cannot encode are written as escapes. ``durable`` False: not after a
    power failure, for those who must not wait for a disk.

    Raises:
        UnsafeFile: its folder is open to others.
        OSError: it cannot be written; the old one is as it was.
    """
    path = os.fspath(path)
    where, name = os.path.split(path)
    content = data.encode("utf-8", "backslashreplace") if isinstance(data, str) else data
    draft = os.path.join(where, f".{name}.{os.getpid()}-{time.monotonic_ns()}")
    fd = open_file(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, secret=secret)
    try:
        try:
            left = memoryview(content)
            while left:
                left = left[os.write(fd, left) :]
            if durable:
                os.fsync(fd)
        finally:
            os.close(fd)
        os.replace(draft, path)
    except BaseException:
        try:
            os.unlink(draft)
        except OSError:
            pass
        raise


def hold(path: StrPath) -> int:
    """A descriptor of a file that only serves to be locked; made if it is not there.

    Raises:
        UnsafeFile, OSError: as `open_file`.
    """
    return open_file(path, os.O_RDWR | os.O_CREAT)


def files_in(folder: Path, pattern: str, *, anybodys: bool = False) -> list[Path]:
    """This user's regular files in a folder that fit a pattern, by name; none if others may put files there, unless
    the folder is ``anybodys`` anyway."""
    try:
        if not anybodys:
            check_folder(folder)
    except OSError:
        return []
    found = []
    for path in sorted(folder.glob(pattern)):
        try:
            about = os.lstat(path)
        except OSError:
            continue
        if stat.S_ISREG(about.st_mode) and belongs_to_me(about):
            found.append(path)
    return found
