"""Checks that only the reader and root can have written a checkpoint."""

from __future__ import annotations

import os
import pwd
import shlex
import stat
from pathlib import Path

from rlmesh.errors import UsageError

__all__ = ["close_if_empty", "fault_of", "faults_in", "keep_others_from_writing", "refused"]

OTHERS_WRITE = 0o022


def fault_of(path: Path, found: os.stat_result) -> str:
    """The reason why another user can have written a file or folder; empty if nobody else can."""
    if stat.S_ISLNK(found.st_mode):
        return f"{path} is a link, which is not followed"
    if not (stat.S_ISREG(found.st_mode) or stat.S_ISDIR(found.st_mode)):
        return f"{path} is neither a file nor a folder"
    if found.st_uid not in (os.geteuid(), 0):  # root can write everywhere anyway
        return f"{path} belongs to {_user(found.st_uid)}, not to you ({_user(os.geteuid())})"
    if found.st_mode & OTHERS_WRITE:
        return f"{path} has mode {stat.S_IMODE(found.st_mode):04o}, so other users can change what is in it"
    return ""


def faults_in(data: Path) -> str:
    """The first fault of a folder and its content. ``data`` itself may be a link; a link inside it is a fault.

    Raises:
        OSError: the folder cannot be read.
    """
    if fault := fault_of(data, data.stat()):
        return fault
    with os.scandir(data) as entries:
        found = sorted((entry.name, entry.stat(follow_symlinks=False)) for entry in entries)
    return next(filter(None, (fault_of(data / name, about) for name, about in found)), "")


def refused(folder: Path, fault: str) -> UsageError:
    """The error for a checkpoint that has a fault."""
    shown = shlex.quote(str(folder))
    return UsageError(
        f"the checkpoint in {folder} is not loaded: {fault}. Keep others from writing there (chmod -R go-w {shown}), "
        f"or copy it into a folder of your own (cp -rL {shown} MINE); load(…, trust_others=True) loads it as it is, if "
        "you trust everybody who can write there"
    )


def close_if_empty(folder: Path) -> None:
    """Make a folder private if it exists, is empty, and others may write to it (as after a lax umask)."""
    try:
        found = folder.stat()
        if found.st_uid == os.geteuid() and found.st_mode & OTHERS_WRITE and not any(folder.iterdir()):
            folder.chmod(0o700)
    except OSError:
        pass  # the folder does not exist, or its file system has no modes


def keep_others_from_writing(data: Path) -> None:
    """Remove the write permission of group and others, which a lax umask may have given, from a folder's files."""
    with os.scandir(data) as entries:
        for entry in entries:
            mode = entry.stat(follow_symlinks=False).st_mode
            if stat.S_ISREG(mode) and mode & OTHERS_WRITE:
                try:
                    os.chmod(entry.path, stat.S_IMODE(mode) & ~OTHERS_WRITE)
                except OSError:
                    pass  # the file system has no modes; `load` reports this


def _user(number: int) -> str:
    try:
        return f"{pwd.getpwuid(number).pw_name}, uid {number}"
    except KeyError:
        return f"uid {number}"
