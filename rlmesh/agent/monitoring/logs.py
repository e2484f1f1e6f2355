"""Log files of members: their paths, their last lines, and following all of them as one stream.

A member's standard output and error *are* its log file, opened for appending: the file has everything even after
SIGKILL, and a slow reader never blocks the member. Nothing here writes to the files. If a line was overwritten, as a
progress bar does, readers return its last state only.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from rlmesh import private_files
from rlmesh.agent.monitoring.progress_bars import compacted, is_bar, is_overwritten, last_state

__all__ = ["LogLine", "LogTail", "Written", "last_lines", "logs_folder", "member_log", "written_before"]

LAST_LINES = 20
LAST_BYTES = 64 * 1024
POLL_BYTES = 1 << 20
"""Bytes read of one file per poll, so that a member that floods its log does not hide the others."""
LINE_BYTES = 64 * 1024
"""A longer line is given in parts: output without line ends must not grow in memory."""


@dataclass(frozen=True, slots=True)
class LogLine:
    """One line of one member, without its end. ``name`` is ``ROLE:rank``."""

    name: str
    text: str


def logs_folder(run_dir: str | Path) -> Path:
    return Path(run_dir) / "logs"


def member_log(run_dir: str | Path, role: str, rank: int) -> Path:
    """The log of a member; all its incarnations append to it."""
    return logs_folder(run_dir) / f"{role}-{rank}.log"


def last_lines(path: str | Path, count: int = LAST_LINES) -> tuple[str, ...]:
    """The last lines of a file, oldest first, including an unfinished last line.

    Reads at most 64 KiB from the end. Bytes that are not UTF-8 become U+FFFD. A file that cannot be read has no lines.
    """
    try:
        with os.fdopen(private_files.open_file(path, os.O_RDONLY, neighbours=True), "rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - LAST_BYTES))
            data = file.read(LAST_BYTES)
    except OSError:
        return ()
    lines = data.split(b"\n")
    if lines[-1] == b"":
        lines.pop()
    if size > LAST_BYTES and len(lines) > 1:
        del lines[0]  # its beginning was not read
    lines = [line for at, line in enumerate(lines, 1) if at == len(lines) or not is_overwritten(line)]
    return tuple(_text(line) for line in lines[-count:])


def _text(line: bytes) -> str:
    return last_state(line).decode("utf-8", "replace")


Written: TypeAlias = tuple[int, int, int]
"""A file's device, inode number and size in bytes."""


def written_before(run_dir: str | Path) -> dict[Path, Written]:
    """The logs that the run directory already has from earlier starts of its job."""
    found = {}
    for path in logs_folder(run_dir).glob("*.log"):
        with suppress(OSError):
            status = path.stat()
            found[path] = (status.st_dev, status.st_ino, status.st_size)
    return found


class _Follower:
    """One file: the bytes written since the last read, cut into lines."""

    def __init__(self, path: Path, skip: Written | None = None) -> None:
        self.path = path
        self._half = b""
        self._over = b""
        """The last line, if the program moved the cursor up to it again."""
        self._offset = 0 if skip is None else skip[2]
        self._identity = None if skip is None else skip[:2]

    def read(self) -> list[bytes]:
        try:
            with os.fdopen(private_files.open_file(self.path, os.O_RDONLY, neighbours=True), "rb") as file:
                status = os.fstat(file.fileno())
                if self._identity != (status.st_dev, status.st_ino) or status.st_size < self._offset:
                    # The name is another file now, or the file was emptied.
                    self._offset, self._half, self._over = 0, b"", b""
                self._identity = (status.st_dev, status.st_ino)
                file.seek(self._offset)
                data = file.read(POLL_BYTES)
        except OSError:
            return []
        self._offset += len(data)
        *ended, self._half = (self._half + data).split(b"\n")
        if ended:
            self._over = ended[-1] if is_overwritten(ended[-1]) else b""
        lines = [line for line in ended if not is_overwritten(line)]
        self._half = compacted(self._half)
        while len(self._half) > LINE_BYTES:
            lines.append(self._half[:LINE_BYTES])
            self._half = self._half[LINE_BYTES:]
        return lines

    def bar(self) -> bytes:
        """The line that is being written over now, if any."""
        return self._half if is_bar(self._half) else self._over

    def behind(self) -> bool:
        """True if the file has more than was read."""
        try:
            return os.stat(self.path).st_size != self._offset
        except OSError:
            return False

    def rest(self) -> list[bytes]:
        half, self._half, self._over = self._half or self._over, b"", b""
        return [half] if half and (last_state(half) or not is_bar(half)) else []


class LogTail:
    """Follows the logs of many members: ``poll()`` gives the lines completed since the last poll.

    Opens each file only while reading, so a thousand members need no descriptors.
    """

    def __init__(self) -> None:
        self._files: dict[str, _Follower] = {}
        self._skipped: dict[Path, Written] = {}

    def skip(self, written: Mapping[Path, Written]) -> None:
        """Skip the present content of these files when they are added later."""
        self._skipped.update(written)

    def add(self, name: str, path: str | Path) -> None:
        """Follow a member's log from its beginning, or from where ``skip`` said. The file may be made later. Adding a
        log twice does nothing."""
        known = self._files.get(name)
        if known is None or known.path != Path(path):
            self._files[name] = _Follower(Path(path), self._skipped.get(Path(path)))

    def poll(self, names: Iterable[str] | None = None) -> list[LogLine]:
        """New complete lines of all members, or of the named ones, member by member. Never blocks."""
        chosen = self._files if names is None else [name for name in names if name in self._files]
        return [LogLine(name, _text(line)) for name in chosen for line in self._files[name].read()]

    def bars(self) -> list[LogLine]:
        """The progress bars that members draw now, as of the last ``poll``; cleared bars are left out."""
        bars = ((name, follower.bar()) for name, follower in self._files.items())
        return [LogLine(name, text) for name, bar in bars if bar and (text := _text(bar))]

    def behind(self) -> bool:
        """True if a file has more than was read."""
        return any(follower.behind() for follower in self._files.values())

    def finish(self) -> list[LogLine]:
        """The remaining lines, including last lines without an end."""
        lines = []
        for name, follower in self._files.items():
            while follower.behind():
                lines += [LogLine(name, _text(line)) for line in follower.read()]
            lines += [LogLine(name, _text(line)) for line in follower.rest()]
        return lines
