"""What all members print, as one stream of ``ROLE:rank | text``, made by following their log files.

The files are the buffer: while whoever shows the lines has no room for more, the rest stays there, and neither the
members nor whoever follows them waits.
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
"""How long the end waits for a reader that takes nothing."""
_PAUSE_S = 0.02


class MergedLogs:
    """Follows the logs of the members that it has seen, and hands each complete line to ``output``; what several
    members print alike is folded.

    Args:
        output: shows one line.
        bars: shows the progress bars that members draw at the moment, all of them at each change.
        ready: whether it can take more now.
        clock: seconds, only going forward.
        pause: waits a number of seconds for it to be ready again.
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
        """Leave out what earlier starts of the job have written."""
        self._tail.skip(written)

    def follow(self, members: Iterable[MemberStatus]) -> None:
        """Follow these members too; those that are known stay as they are."""
        for member in members:
            if not member.fused_with:  # else what it prints is in that member's log
                self._paths[f"{member.role}:{member.rank}"] = member.log_path
                self._tail.add(f"{member.role}:{member.rank}", member.log_path)

    def follow_files(self, files: Iterable[tuple[str, str]]) -> None:
        """The same for names and paths."""
        for name, path in files:
            self._tail.add(name, path)

    def poll(self) -> None:
        """Show what is new, if there is room for it."""
        if self._ready():
            self._show(self._tail.poll())
            self._update_bars()

    def finish(self) -> None:
        """All that is left, half lines included. A reader that takes nothing for ``STALL_S`` is not waited for."""
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
        """The lines as name and text. What a member says of its failure is cut in the middle: all of it is in its
        log."""
        for name, group in groupby(lines, lambda line: line.name):
            texts = [line.text for line in group]
            at = next(
                (n for n, text in enumerate(texts) if text.startswith(f"{name}: ") and _FAILED.search(text)), None
            )
            if at is not None:
                texts[at:] = shorten(texts[at:], FAILURE_LINES, self._paths.get(name, ""))
            yield from ((name, text) for text in texts)
