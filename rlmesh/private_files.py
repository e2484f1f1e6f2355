"""Files and folders of a run, made private to their owner and opened only if no other user can have made them.

Everything that a run writes or reads back goes through this module. A folder has mode 0700, a file 0600, whatever the
umask. A file is opened without following a link, only if it is a regular file with one name, belongs to this user (or
to root), and no other user can write to it; the same holds for its folder. Anything else raises :class:`UnsafeFile`,
an ``OSError``, so that code that can do without the file continues without it.

``RLMESH_SHARE_WITH_GROUP=<group>`` in the environment of the process that submits the job opens a run to a group: its
folders then have mode 2750 and that group, its files 0640. The socket folder, the job's key and the job's state stay
private.

Standard library only: the guardian runs without site-packages.
"""

from __future__ import annotations

import errno
import os
import stat

TYPE_CHECKING = False
if TYPE_CHECKING or __package__:
    from rlmesh.drafts import draft_beside, remove_drafts
else:  # in the guardian, which loads this file from its folder
    from drafts import draft_beside, remove_drafts
if TYPE_CHECKING:
    from pathlib import Path

    StrPath = str | os.PathLike[str]

__all__ = [
    "SHARE_WITH_GROUP", "UnsafeFile", "append_to", "check_folder", "cut_torn_line", "files_in", "group_number", "hold",
    "log_to", "make_folder", "make_private", "open_file", "read", "refuse_odd", "share_with", "write_whole",
]  # fmt: skip

SHARE_WITH_GROUP = "RLMESH_SHARE_WITH_GROUP"
"""Environment variable with the group that may read a run's files."""
FOLDER, FILE = 0o700, 0o600
SHARED_FOLDER, SHARED_FILE = 0o2750, 0o640
OTHERS_WRITE = 0o022
"""Mode bits by which users besides the owner can replace files."""
_TORN_BLOCK_BYTES = 1 << 16
"""How much is read at once to find the end of the last whole line."""


class UnsafeFile(PermissionError):
    """Another user may have made this file or folder, or may change it."""

    def __init__(self, path: StrPath, why: str) -> None:
        super().__init__(errno.EPERM, why, os.fspath(path))

    def __str__(self) -> str:
        return f"{self.filename} {self.strerror}"

    def __reduce__(self) -> tuple[type[UnsafeFile], tuple[str, str]]:
        return UnsafeFile, (str(self.filename), str(self.strerror))


def share_with() -> str:
    """The group that may read the run; empty for no group."""
    return os.environ.get(SHARE_WITH_GROUP, "")


def modes(*, secret: bool = False) -> tuple[int, int]:
    """The modes of new folders and files; ``secret`` ones are private even if the run is opened to a group."""
    return (SHARED_FOLDER, SHARED_FILE) if share_with() and not secret else (FOLDER, FILE)


def belongs_to_me(found: os.stat_result) -> bool:
    """True if a file belongs to this user or to root, who can do everything anyway."""
    return found.st_uid in (os.geteuid(), 0)


# Folders


def make_folder(path: StrPath, *, secret: bool = False) -> None:
    """Make a private folder with its missing parents, or check a folder that exists.

    Raises:
        UnsafeFile: the folder exists and belongs to another user, or others may write to it.
        OSError: the folder cannot be made.
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
            raise  # a file system without modes, so that others can write to the folder


def group_number(name: str) -> int:
    """The id of a group, by its name or its id as text.

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
    """Check that only this user can put files into a folder.

    Raises:
        UnsafeFile: the folder belongs to another user, or others may write to it; the text says what to do.
        OSError: the folder does not exist, or is no folder.
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
    """Make a folder of this user private if others can write to it, because of an earlier version or the umask.

    A folder of another user stays unchanged.
    """
    try:
        found = os.lstat(path)
        if stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid() and found.st_mode & OTHERS_WRITE:
            os.chmod(path, FOLDER)
    except OSError:
        pass  # not there


# Files


def open_file(path: StrPath, flags: int, *, secret: bool = False, neighbours: bool = False) -> int:
    """Open a file as ``os.open`` does, if that is safe; a new file gets its mode whatever the umask.

    Args:
        path: the file.
        flags: as for ``os.open``; links are never followed, and opening never blocks.
        secret: make the file private even if the run is opened to a group.
        neighbours: follow a link to another file of the same folder (fused members share a log).

    Raises:
        UnsafeFile: the file is a link or no regular file, or others can write to the file or its folder.
        OSError: the file cannot be opened.
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
    """Check that a path is a regular file of this user with one name, or a link to such a file in the same folder.

    Raises:
        UnsafeFile: the path is something else, or its folder is open to others.
        OSError: the path does not exist.
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
    """The name of the file in the same folder that a name links to, or the name itself."""
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
    """Set a file's mode, which may lack bits by the umask or have too many from an earlier version."""
    found = os.fstat(fd)
    if stat.S_IMODE(found.st_mode) != mode and found.st_uid == os.geteuid():
        try:
            os.fchmod(fd, mode)
        except OSError:
            pass  # a file system without modes; whether others can write is checked next


def append_to(path: StrPath) -> int:
    """Open a file of the run for appending, and make the file and its folders if necessary; returns the descriptor,
    which can be read, too.

    Raises:
        UnsafeFile, OSError: as `open_file`.
    """
    make_folder(os.path.dirname(os.fspath(path)) or ".")
    return open_file(path, os.O_RDWR | os.O_APPEND | os.O_CREAT)


def cut_torn_line(fd: int) -> None:
    """Remove what follows the last line break of a file, which a writer that was killed in the middle may have left.

    Args:
        fd: of a file of lines that is open for reading and writing.
    """
    end = size = os.fstat(fd).st_size
    while end:
        begin = max(0, end - _TORN_BLOCK_BYTES)
        found = os.pread(fd, end - begin, begin).rfind(b"\n")
        if found >= 0:
            end = begin + found + 1
            break
        end = begin
    if end < size:
        os.ftruncate(fd, end)


def log_to(path: StrPath) -> int:
    """Open a log for appending; where a full disk has no room for a new file, open ``/dev/null`` instead.

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
    """Replace a file atomically: after any death of the writer, and on a full disk, it is the old or the new one.

    Args:
        data: the content; characters that UTF-8 cannot encode are written as escapes.
        secret: make the file private even if the run is opened to a group.
        durable: also atomic after a power failure; False does not wait for the disk.

    Raises:
        UnsafeFile: the folder is open to others.
        OSError: the file cannot be written; the old file is unchanged.
    """
    path = os.fspath(path)
    content = data.encode("utf-8", "backslashreplace") if isinstance(data, str) else data
    draft = draft_beside(path)
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
    remove_drafts(path)


def hold(path: StrPath) -> int:
    """Open a file that only serves to be locked, and make it if necessary; returns the descriptor.

    Raises:
        UnsafeFile, OSError: as `open_file`.
    """
    return open_file(path, os.O_RDWR | os.O_CREAT)


def files_in(folder: Path, pattern: str, *, anybodys: bool = False) -> list[Path]:
    """This user's regular files in a folder that match a pattern, sorted by name.

    Returns none if others may put files into the folder, unless ``anybodys`` says that they may.
    """
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
