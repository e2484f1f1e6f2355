"""Creation of the run directory, private to this user, or the check of an existing one for planted files."""

from __future__ import annotations

import os
from fnmatch import fnmatch
from pathlib import Path

from rlmesh import private_files
from rlmesh.private_files import UnsafeFile

__all__ = ["make_run_folder"]

FOLDERS = ("logs", "incidents", "timeline", "tensorboard")
FILES = (
    "state.*", "metrics.*", "events.jsonl", "chaos.jsonl", "job.json", "starts.json", "end.json", "held-by.json",
    "exit-node*.json", "stacks-*.txt", "report.png", "relaunch.log",
)  # fmt: skip
"""File names that rlmesh uses in a run directory; others belong to the directory's owner."""


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
        if name in FOLDERS:
            if path.is_symlink():
                raise UnsafeFile(path, "is a link, which is not followed: remove it")
            private_files.check_folder(path)
            for inner in os.listdir(path):
                _refuse_odd(path / inner)
        elif any(fnmatch(name, pattern) for pattern in FILES):
            _refuse_odd(path)


def _refuse_odd(path: Path) -> None:
    try:
        private_files.refuse_odd(path)
    except FileNotFoundError:
        pass  # a temporary file of a node that has started already
