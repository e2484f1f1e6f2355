"""A file to which data is appended whole or not at all, and reading such files."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rlmesh import private_files

__all__ = ["TIMELINE_FOLDER", "AppendFile", "ends_torn", "read_json_lines"]

TIMELINE_FOLDER = "timeline"
"""The folder in the run directory to which members append their calls. Defined here, since members need no reader."""


class AppendFile:
    """Appends to ``path``, which is created with its directories at the first append. It has one writer at a time.

    Each append is one ``write`` without a buffer in the process, so that the data survives any death of the writer.
    When the disk fills up in the middle of an append, the file is cut back to its size before. When a writer is killed
    in the middle of one, the next writer removes the part of a line that it left.

    Args:
        path: of the file.
        lines: whether the file consists of lines; a file of anything else is only appended to.
    """

    def __init__(self, path: Path, *, lines: bool = True) -> None:
        self.path = path
        self._has_lines = lines
        self._fd: int | None = None

    @property
    def is_open(self) -> bool:
        return self._fd is not None

    def append(self, data: bytes) -> None:
        """Append ``data``.

        Raises:
            OSError: nothing of ``data`` is in the file.
        """
        if self._fd is None:
            self._fd = private_files.append_to(self.path)
            try:
                if self._has_lines:
                    private_files.cut_torn_line(self._fd)
            except OSError:
                self.close()  # so that the next append tries it again
                raise
        written = os.write(self._fd, data)
        if written < len(data):
            os.ftruncate(self._fd, os.fstat(self._fd).st_size - written)
            raise OSError(f"{self.path}: only {written} of {len(data)} bytes could be written")

    def close(self) -> None:
        """Close the file. Safe to call twice."""
        fd, self._fd = self._fd, None
        if fd is not None:
            os.close(fd)


def ends_torn(path: Path) -> bool:
    """True if the file ends inside a line, which a killed writer may have left."""
    try:
        with os.fdopen(private_files.open_file(path, os.O_RDONLY), "rb") as file:
            if file.seek(0, os.SEEK_END) == 0:
                return False
            file.seek(-1, os.SEEK_END)
            return file.read(1) != b"\n"
    except FileNotFoundError:
        return False


def read_json_lines(path: Path) -> Iterator[Any]:
    """The values of a file with one JSON value per line; torn lines are skipped. A file that is missing or unsafe to
    read has none."""
    try:
        file = os.fdopen(private_files.open_file(path, os.O_RDONLY), "rb")
    except OSError:
        return
    with file:
        for line in file:
            try:
                yield json.loads(line)
            except ValueError:
                continue
