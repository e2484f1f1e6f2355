"""The output of all members as one stream of ``ROLE:rank | text``, made by following their log files.

The files are the buffer: while the reader has no room for more lines, they stay in the files, and neither the members
nor the follower waits.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import groupby
from pathlib import Path

from rlmesh.agent.monitoring.logs import LogLine, LogTail, Written
from rlmesh.job.status import MemberStatus
from rlmesh.observe.views.folding import Folding
from rlmesh.observe.views.safe_text import shorten

FAILURE_LINES = 12
_FAILED = re.compile(r" failed$")
STALL_S = 2.0
"""Seconds that ``finish`` waits for a reader that takes nothing."""
_PAUSE_S = 0.02


class MergedLogs:
    """Follows the logs of members and passes each complete line to ``output``; equal lines of several members are
    folded.

    Args:
        output: shows one line.
        bars: shows the members' current progress bars, all of them at each change.
        ready: returns whether ``output`` can take more now.
        clock: seconds, monotonic.
        pause: waits a number of seconds for ``output`` to be ready again.
    """

    def __init__(
        self, output: Callable[[str], None], ready: Callable[[], bool] = lambda: True, *,
        bars: Callable[[Sequence[str]], None] | None = None, clock: Callable[[], float] = time.monotonic,
        pause: Callable[[float], None] = time.sleep,
    ) -> None:  # fmt: skip
        self._tail = LogTail()
        self._folding = Folding()
        self._output, self._ready, self._clock, self._pause = output, ready, clock, pause
        self._paths: dict[str, str] = {}
        self._show_bars = bars
        self._bars: list[str] = []

    def skip(self, written: Mapping[Path, Written]) -> None:
        """Skip the lines of earlier starts of the job."""
        self._tail.skip(written)

    def follow(self, members: Iterable[MemberStatus]) -> None:
        """Follow these members in addition to the known ones."""
        for member in members:
            if not member.fused_with:  # a fused member's output is in its host's log
                self._paths[f"{member.role}:{member.rank}"] = member.log_path
                self._tail.add(f"{member.role}:{member.rank}", member.log_path)

    def follow_files(self, files: Iterable[tuple[str, str]]) -> None:
        """Follow these log files, given as names and paths."""
        for name, path in files:
            self._tail.add(name, path)

    def poll(self) -> None:
        """Show new lines, if there is room for them."""
        if self._ready():
            self._show(self._tail.poll())
            self._update_bars()

    def finish(self) -> None:
        """Show all remaining lines, incomplete ones included; give up on a reader that takes nothing for
        ``STALL_S``."""
        deadline = self._clock() + STALL_S
        while self._tail.behind():
            if self._ready():
                self._show(self._tail.poll())
                deadline = self._clock() + STALL_S
            elif self._clock() > deadline:
                return
            else:
                self._pause(_PAUSE_S)
        self._show(self._tail.finish())
        for line in self._folding.finish():
            self._output(line)
        self._update_bars()

    def _update_bars(self) -> None:
        if self._show_bars is None:
            return
        bars = [f"{bar.name} | {bar.text}" for bar in self._tail.bars()]
        if bars != self._bars:
            self._bars = bars
            self._show_bars(bars)

    def _show(self, lines: Iterable[LogLine]) -> None:
        for line in self._folding.take(self._shortened(lines), self._clock()):
            self._output(line)

    def _shortened(self, lines: Iterable[LogLine]) -> Iterable[tuple[str, str]]:
        """Yield the lines as name and text. A member's failure message is cut in the middle; its log has all of it."""
        for name, group in groupby(lines, lambda line: line.name):
            texts = [line.text for line in group]
            at = next(
                (n for n, text in enumerate(texts) if text.startswith(f"{name}: ") and _FAILED.search(text)), None
            )
            if at is not None:
                texts[at:] = shorten(texts[at:], FAILURE_LINES, self._paths.get(name, ""))
            yield from ((name, text) for text in texts)
