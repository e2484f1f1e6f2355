"""A file to which whole pieces are appended, or nothing."""

from __future__ import annotations

import os
from pathlib import Path

from rlmesh import private_files

__all__ = ["TIMELINE_FOLDER", "AppendFile"]

TIMELINE_FOLDER = "timeline"
"""In the run directory: where members append their calls. Here, where it costs them no reader of such files."""


class AppendFile:
    """Appends to ``path``, which is made with its directories at the first piece.

    Each piece is one ``write`` without a buffer in the process, so that it survives any death of the writer.
    When the disk fills up in the middle of a piece, the file is cut back to what it was before.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
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
    """Does the file end inside a line? A writer that was killed may have left one."""
    try:
        with os.fdopen(private_files.open_file(path, os.O_RDONLY), "rb") as file:
            if file.seek(0, os.SEEK_END) == 0:
                return False
            file.seek(-1, os.SEEK_END)
            return file.read(1) != b"\n"
    except FileNotFoundError:
        return False
