"""What all members print, as one stream of ``ROLE:rank | text``, made by following their log files."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from rlmesh.agent.logs import LogLine, LogTail
from rlmesh.job.status import MemberStatus


class MergedLogs:
    """Follows the logs of the members that it has seen, and hands each complete line to ``output``."""

    def __init__(self, output: Callable[[str], None]) -> None:
        self._tail = LogTail()
        self._output = output

    def follow(self, members: Iterable[MemberStatus]) -> None:
        """Follow these members too; those that are known stay as they are."""
        for member in members:
            self._tail.add(f"{member.role}:{member.rank}", member.log_path)

    def poll(self) -> None:
        self._write(self._tail.poll())

    def finish(self) -> None:
        """All that is left, half lines included."""
        self._write(self._tail.finish())

    def _write(self, lines: Iterable[LogLine]) -> None:
        for line in lines:
            self._output(f"{line.name} | {line.text}")
